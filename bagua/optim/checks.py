"""Checks of optimizers' arguments; every message names the argument."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

__all__ = ["check_betas", "check_flag", "check_number", "check_steps"]


def check_number(name: str, value: Any, low: float = 0.0, high: float = math.inf, *, open_low: bool = False) -> None:
    """Check that an option is a finite number within `low` (left out if `open_low`) and `high`.

    Raises:
        ValueError: names the argument.
    """
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    good = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
    if not good or not low <= number <= high or (open_low and number == low):
        least = f"{'>' if open_low else '>='} {low:g}"
        raise ValueError(
            f"{name}: expected a number {least}{'' if math.isinf(high) else f' and <= {high:g}'}, got {value!r}"
        )


def check_betas(name: str, value: Any) -> None:
    """Check that an option is two numbers in [0, 1).

    Raises:
        ValueError: names the argument.
    """
    good = isinstance(value, list | tuple) and len(value) == 2
    if not good or not all(isinstance(b, int | float) and not isinstance(b, bool) and 0 <= b < 1 for b in value):
        raise ValueError(f"{name}: expected two numbers in [0, 1), got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Check that an option is True or False.

    Raises:
        ValueError: names the argument.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {value!r}")


def check_steps(name: str, value: Any) -> None:
    """Check that an option is a positive number of steps.

    Raises:
        ValueError: names the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a number of steps >= 1, got {value!r}")

"""Checks of options that several algorithms have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

__all__ = ["check_number", "shown"]


def check_number(name: str, value: object, low: float, high: float | None = None, *, closed: bool = False) -> None:
    """Check that an option is a number in [low, high), or in [low, high] if `closed`; None: no upper limit.

    Raises:
        ValueError: names the option.
    """
    top = float("inf") if high is None else high
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (low <= value < top or (closed and value == top))
    ):
        wanted = f">= {low:g}" if high is None else f"in [{low:g}, {high:g}{']' if closed else ')'}"
        raise ValueError(f"{name}: expected a number {wanted}, got {value!r}")


def shown(algorithm: Any, unless_open: Collection[str]) -> str:
    """Return the repr of a dataclass without the options `unless_open` that are None: state that is older has none."""
    names = [each.name for each in fields(algorithm)]
    given = [name for name in names if name not in unless_open or getattr(algorithm, name) is not None]
    options = ", ".join(f"{name}={getattr(algorithm, name)!r}" for name in given)
    return f"{type(algorithm).__qualname__}({options})"

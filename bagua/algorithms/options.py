"""Checks of options that several algorithms have."""

from __future__ import annotations

__all__ = ["check_number"]


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

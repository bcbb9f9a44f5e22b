"""Checks of options that several algorithms have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from bagua.codecs import Codec

__all__ = ["check_corrections", "check_keeps_changes", "check_number", "describe", "shown"]

_MANY = 1 << 20


def check_corrections(mean_moments: object, scale_second_moment: object) -> None:
    """Check the two options that correct Adam's moments, of which at most one may be on.

    Raises:
        ValueError: one is no flag, or both are true.
    """
    for name, value in (("mean_moments", mean_moments), ("scale_second_moment", scale_second_moment)):
        if not isinstance(value, bool | None):
            raise ValueError(f"{name}: expected True, False or None, got {value!r}")
    if mean_moments and scale_second_moment:
        raise ValueError("mean_moments and scale_second_moment contradict: the first needs no estimate")


def check_keeps_changes(codec: Codec, coarse: bool = False) -> None:
    """Check that little of a change of the weights is lost if it is sent once with `codec`, without error feedback.

    Args:
        codec: what encodes the change.
        coarse: biased codecs of few bits may be used, if they send something of every element.

    Raises:
        ValueError: the codec leaves elements out, or is biased and has fewer than 4 bits.
    """
    few = not coarse and not codec.unbiased and 8 * codec.wire_bytes(_MANY) < 4 * _MANY
    if codec.drops or few:
        raise ValueError(
            f"codec {codec.name!r}: what it does not send of a change would be lost; use an unbiased codec, as "
            "'eden', or diloco with error_feedback=True"
        )


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


def describe(algorithm: Any) -> str:
    """Return the algorithm with all options: where one was left open, with the value that is used if it is known."""
    if not is_dataclass(algorithm):
        return repr(algorithm)
    used: Mapping[str, object] = getattr(algorithm, "effective_options", {})
    options = ", ".join(
        f"{each.name}={describe(used.get(each.name, getattr(algorithm, each.name)))}"
        for each in fields(algorithm)
        if each.repr
    )
    return f"{type(algorithm).__qualname__}({options})"

"""Interleaved measurements, so that other load on the machine affects all alike; and their statistics."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

__all__ = ["Quartiles", "pairs", "quartiles", "turns"]

Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")


class Quartiles(NamedTuple):
    """The median and the quartiles on both sides of it."""

    low: float
    median: float
    high: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the quartiles of `values`, in any order; a single value is all three.

    Raises:
        statistics.StatisticsError: there is no value.
    """
    if len(values) == 1:
        return Quartiles(*[float(values[0])] * 3)
    return Quartiles(*statistics.quantiles(values, n=4))


def turns(
    calls: Mapping[Key, Callable[[], Found]],
    rounds: int,
    warmup: int,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Key, list[Found]]:
    """Make all `calls` once in each round, in their order.

    Args:
        calls: by name; each returns one measurement.
        rounds: that count.
        warmup: rounds before them, of which nothing is kept.
        told: called after each round with the rounds made and all rounds.

    Returns:
        the measurements of each call, one of each round.
    """
    found: dict[Key, list[Found]] = {name: [] for name in calls}
    for number in range(warmup + rounds):
        for name, call in calls.items():
            measured = call()
            if number >= warmup:
                found[name].append(measured)
        told(number + 1, warmup + rounds)
    return found


def pairs(first: Callable[[], Found], second: Callable[[], Found], count: int) -> list[tuple[Found, Found]]:
    """Make `count` pairs of measurements in alternating order: first second, second first, and so on.

    Returns:
        what `first` and `second` measured, in this order.
    """
    found: list[tuple[Found, Found]] = []
    for number in range(count):
        if number % 2:
            after = second()
            found.append((first(), after))
        else:
            before = first()
            found.append((before, second()))
    return found

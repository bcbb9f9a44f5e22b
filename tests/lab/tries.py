"""A measured value on a machine whose cores are busy: wrong ones may be chance, a right one is not."""

from __future__ import annotations

from collections.abc import Callable

TRIES = 5


def measured_between(low: float, high: float, measure: Callable[[], float]) -> bool:
    """Whether one of a few measurements lies between; prints all if none does.

    A process that is not scheduled for a while at the beginning of its window finds more than the link carries in a
    window, and less at the end.
    """
    values: list[float] = []
    while len(values) < TRIES:
        values.append(measure())
        if low < values[-1] < high:
            return True
    print(f"measured {values}, none between {low} and {high}")
    return False

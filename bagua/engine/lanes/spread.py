"""Which lane carries which part: the one that has been given the fewest elements so far."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["lanes_of_parts"]


def lanes_of_parts(sizes: Sequence[Sequence[int]], width: int) -> tuple[tuple[int, ...], ...]:
    """Return the lane of each part of each bucket, so that all lanes end at about the same time.

    Args:
        sizes: elements of each part, by bucket, in the order of exchange.
        width: how many lanes there are.
    """
    given = [0] * width
    found: list[tuple[int, ...]] = []
    for parts in sizes:
        chosen: list[int] = []
        for numel in parts:
            lane = min(range(width), key=given.__getitem__)
            given[lane] += numel
            chosen.append(lane)
        found.append(tuple(chosen))
    return tuple(found)

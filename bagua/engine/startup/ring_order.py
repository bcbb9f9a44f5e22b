"""The ring of nodes whose slowest link is the fastest. Numbers only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

__all__ = ["best_ring", "worth_of"]

_EXACT = 9  # nodes, up to which all rings are compared
_SWEEPS = 50  # of improvements with more nodes; each ends with a better ring, and a few are enough

Rates = Sequence[Sequence[float]]
Worth = tuple[float, float]


def worth_of(ring: Sequence[int], rates: Rates) -> Worth:
    """The rate of the ring's slowest link, and the sum of the logarithms of all; the greater, the better.

    Args:
        ring: nodes; the last one is followed by the first.
        rates: rate of the link between two nodes, symmetric and positive.
    """
    links = [rates[a][b] for a, b in zip(ring, [*ring[1:], *ring[:1]], strict=True)]
    return min(links), math.fsum(map(math.log, sorted(links)))


def best_ring(rates: Rates) -> list[int]:
    """Return the order of nodes in the ring of greatest `worth_of`, from node 0 on.

    Exact for up to 9 nodes. For more, the best of the rings that go on to the nearest node left, one from each node,
    improved by turning a part of it round (2-opt) until no such change helps. Equal rates give equal rings.

    Examples:
        >>> from bagua.engine.startup.ring_order import best_ring
        >>> best_ring([[1, 5, 1, 9], [5, 1, 8, 1], [1, 8, 1, 7], [9, 1, 7, 1]])
        [0, 1, 2, 3]
        >>> best_ring([[1, 1, 9, 9], [1, 1, 9, 9], [9, 9, 1, 1], [9, 9, 1, 1]])
        [0, 2, 1, 3]
    """
    count = len(rates)
    if count <= 3:
        return list(range(count))
    ring = _exact(rates) if count <= _EXACT else _improved(rates)
    at = ring.index(0)
    ring = [*ring[at:], *ring[:at]]
    return ring if ring[1] <= ring[-1] else [0, *reversed(ring[1:])]


def _exact(rates: Rates) -> list[int]:
    """First the fastest slowest link, then the greatest sum over rings without slower ones."""
    ring = _longest(rates, min, math.inf)
    least, _ = worth_of(ring, rates)
    logs = [[math.log(rate) if rate >= least else -math.inf for rate in row] for row in rates]
    return _longest(logs, lambda total, each: total + each, 0.0)


def _longest(values: Rates, joined: Callable[[float, float], float], nothing: float) -> list[int]:
    """The ring with the greatest value of all of its links joined (Held and Karp 1962, section 2)."""
    count = len(values)
    # By the set of nodes visited (node 0 is in all) and the last one: the value, and the node before.
    ways: dict[tuple[int, int], tuple[float, int]] = {(1, 0): (nothing, 0)}
    for visited in range(1, 1 << count, 2):
        for last in range(count):
            if (visited, last) not in ways:
                continue
            value = ways[visited, last][0]
            for node in range(1, count):
                if visited >> node & 1:
                    continue
                key, found = (visited | 1 << node, node), joined(value, values[last][node])
                if key not in ways or found > ways[key][0]:
                    ways[key] = found, last
    every = (1 << count) - 1
    last = max(range(1, count), key=lambda node: joined(ways[every, node][0], values[node][0]))
    ring, visited = [], every
    while last:
        ring.append(last)
        visited, last = visited & ~(1 << last), ways[visited, last][1]
    return [0, *reversed(ring)]


def _improved(rates: Rates) -> list[int]:
    rings = [_greedy(rates, first) for first in range(len(rates))]
    ring = max(rings, key=lambda each: worth_of(each, rates))
    worth = worth_of(ring, rates)
    for _ in range(_SWEEPS):
        better = False
        for a in range(len(ring) - 1):
            for b in range(a + 2, len(ring) + (a > 0)):
                turned = [*ring[: a + 1], *reversed(ring[a + 1 : b]), *ring[b:]]
                if (found := worth_of(turned, rates)) > worth:
                    ring, worth, better = turned, found, True
        if not better:
            break
    return ring


def _greedy(rates: Rates, first: int) -> list[int]:
    ring, left = [first], set(range(len(rates))) - {first}
    while left:
        ring.append(max(left, key=lambda node: (rates[ring[-1]][node], -node)))
        left.remove(ring[-1])
    return ring

"""Which pairs of nodes reach each other faster through a third one. Numbers only."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["best_routes", "slowest_share"]

Table = Sequence[Sequence[float]]

# A way through a third node counts as faster from this ratio on: measurements differ by chance.
_CLEARLY = 1.2
# What a route saves for so many bits has to outweigh the latency that it adds. A compressed chunk has as many and more.
_CHUNK_BITS = 8 * 64 * 2**10


def best_routes(rates: Table, latencies: Table, outward: Sequence[float] = ()) -> dict[tuple[int, int], int]:
    """Return the node through which a pair of nodes (the lower one first) should send, for pairs that should.

    All nodes send to each other alike and at once, as in an all-reduce of compressed chunks. A node sends no faster
    than it does to all others. The pair that takes longest goes through the node by which it is fastest, as long as it
    becomes clearly faster and nothing else as slow; then the next one. If that makes the slowest pair less than 20 %
    faster, there are no routes.

    Args:
        rates: bits per second between two nodes, symmetric and positive.
        latencies: seconds one way between two nodes.
        outward: bits per second that each node sends to all others at once; (): not known, as over its fastest link.

    Examples:
        >>> from bagua.engine.startup.routes import best_routes
        >>> best_routes([[0, 50e6, 1e9], [50e6, 0, 1e9], [1e9, 1e9, 0]], [[1e-3] * 3] * 3)
        {(0, 1): 2}
    """
    count = len(rates)
    load = _direct(count)
    fastest = [max(rates[a][b] for b in range(count) if b != a) for a in range(count)]
    fastest = [max(pair) for pair in zip(fastest, outward or fastest, strict=True)]
    out = [float(count - 1)] * count  # chunks that leave a node
    before = _longest(load, out, rates, fastest)
    routes: dict[tuple[int, int], int] = {}
    while True:
        pair = max(
            (pair for pair in load if pair not in routes),
            key=lambda pair: load[pair] / rates[pair[0]][pair[1]],
            default=None,
        )
        if pair is None:
            break
        a, b = pair
        now = load[pair] / rates[a][b]

        def then(via: int, a: int = a, b: int = b) -> tuple[float, float]:
            """The longest time of what the route would load, and of its links alone."""
            links = max((load[_pair(end, via)] + 1) / rates[end][via] for end in (a, b))
            return max(links, (out[via] + 2) / fastest[via]), links

        near = [via for via in range(count) if via not in pair and _is_near(a, b, via, rates, latencies)]
        via = min(near, key=lambda each: (then(each), each), default=None)
        if via is None or then(via)[0] * _CLEARLY > now:
            break  # nor would it help to move a faster pair
        routes[pair] = via
        load[pair] -= 1
        out[via] += 2
        for end in pair:
            load[_pair(end, via)] += 1
    return routes if _longest(load, out, rates, fastest) * _CLEARLY <= before else {}


def slowest_share(rates: Table, routes: dict[tuple[int, int], int]) -> float:
    """Bits per second of the pair that has least, where all nodes send to each other alike and at once."""
    count = len(rates)
    load = _direct(count)
    for (a, b), via in routes.items():
        load[a, b] -= 1
        for end in (a, b):
            load[_pair(end, via)] += 1
    return min(rates[a][b] / many for (a, b), many in load.items() if many)


def _pair(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)


def _direct(count: int) -> dict[tuple[int, int], int]:
    return {(a, b): 1 for a in range(count) for b in range(a + 1, count)}


def _longest(load: dict[tuple[int, int], int], out: Sequence[float], rates: Table, fastest: Sequence[float]) -> float:
    links = max(many / rates[a][b] for (a, b), many in load.items())
    return max(links, *(sent / rate for sent, rate in zip(out, fastest, strict=True)))


def _is_near(a: int, b: int, via: int, rates: Table, latencies: Table) -> bool:
    """Whether a chunk is there earlier, with its latency."""
    added = latencies[a][via] + latencies[via][b] - latencies[a][b]
    saved = _CHUNK_BITS / rates[a][b] - _CHUNK_BITS / min(rates[a][via], rates[via][b])
    return added < saved

"""Link probe: whether the network or the CPU limits the first broadcast, which sets the number of lanes for plain sums.

Several flows hide latency and the pauses between gloo's hops. Where the network is so fast that the CPU is the limit,
they only compete for cores.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence

from bagua.comm.team import Team, decode, encode

__all__ = ["lanes_of_sums"]

_FAST_BYTES_PER_S = 160e6  # more than 1 Gbit/s can carry
_SMALLEST_BYTES = 8 * 2**20  # less says more about the start than about the rate
_CORES_PER_LANE = 2  # gloo's own thread and ours


def lanes_of_sums(
    team: Team, nodes: Sequence[Sequence[int]], num_bytes: int, broadcast: Callable[[], None]
) -> int | None:
    """Run `broadcast`, which brings `num_bytes` from rank 0 to each rank; how many lanes plain sums should share.

    Changes only which lanes carry the parts, hence no result. Collective; the same answer on all ranks.

    Returns:
        None where all lanes should, else at least 2: one divides and copies while the other one sends.
    """
    team.all_gather_bytes("start of the first broadcast", b"")  # a rank that comes late is no slow network
    started = time.perf_counter()
    broadcast()
    seconds = time.perf_counter() - started
    if team.size == 1 or team.backend != "gloo" or num_bytes < _SMALLEST_BYTES:
        return None
    ranks_here = next(len(node) for node in nodes if team.rank in node)
    cores = usable_cores() / ranks_here
    found = [
        decode(message)
        for message in team.all_gather_bytes("measured rate", encode([num_bytes / max(seconds, 1e-9), cores]))
    ]
    if _typical_rate([rate for rate, _ in found], nodes) < _FAST_BYTES_PER_S:
        return None
    return max(2, int(min(cores for _, cores in found) / _CORES_PER_LANE))


def usable_cores() -> int:
    """CPU cores that this process may use; all of the machine where the system does not tell, as on macOS."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _typical_rate(rates: Sequence[float], nodes: Sequence[Sequence[int]]) -> float:
    """Of a link between nodes, in bytes per second.

    Rank 0 is done when the kernel has taken its bytes, so only the others know. What came to another node came through
    the network, so no rank there is faster than that; those that are slower also waited for others.
    """
    others = [node for node in nodes if 0 not in node] or [[rank for rank in range(len(rates)) if rank]]
    return statistics.median(max(rates[rank] for rank in node) for node in others)

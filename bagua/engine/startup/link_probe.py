"""Link probe: what the first broadcast and the store's round trip say about the links, for plain sums.

Several flows hide latency and the pauses between gloo's hops. Where the network is so fast that the CPU is the limit,
they only compete for cores. And how much a link holds says from which size on a sum goes from rank to rank.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bagua.comm.groups import STRAIGHT_CHUNK_BYTES
from bagua.comm.team import Team, decode, encode

__all__ = ["Links", "probe_links"]

_FAST_BYTES_PER_S = 160e6  # more than 1 Gbit/s can carry
_SMALLEST_BYTES = 8 * 2**20  # less says more about the start than about the rate
_CORES_PER_LANE = 2  # gloo's own thread and ours
_ROUND_TRIPS = 3
# Of what a link holds in one latency. Straight to their owners, chunks take 2 latencies instead of 2 (R - 1), but all
# senders meet in the receivers' links. 4 hosts were even at half, 8 hosts faster straight at a quarter.
_STRAIGHT_SHARE = 0.5


@dataclass(frozen=True)
class Links:
    """What was found; the same on all ranks. It changes no bit of a result.

    Attributes:
        lanes_of_sums: how many lanes plain sums should share; None: all, else at least 2: one divides and copies while
            the other one sends.
        straight_chunk_bytes: see `Group`.
    """

    lanes_of_sums: int | None = None
    straight_chunk_bytes: int = STRAIGHT_CHUNK_BYTES


def probe_links(team: Team, nodes: Sequence[Sequence[int]], num_bytes: int, broadcast: Callable[[], None]) -> Links:
    """Run `broadcast`, which brings `num_bytes` from rank 0 to each rank. Collective.

    Raises:
        CommunicationError: a rank did not arrive, or the store is unreachable.
    """
    # Before the broadcast, whose bytes the answers would wait behind.
    round_trip_s = _round_trip_s(team) if team.size > 1 and team.backend == "gloo" else 0.0
    team.all_gather_bytes("start of the first broadcast", b"")  # a rank that comes late is no slow network
    started = time.perf_counter()
    broadcast()
    seconds = time.perf_counter() - started
    if team.size == 1 or team.backend != "gloo":
        return Links()
    ranks_here = next(len(node) for node in nodes if team.rank in node)
    cores = usable_cores() / ranks_here
    found = [
        decode(message)
        for message in team.all_gather_bytes(
            "measured links", encode([num_bytes / max(seconds, 1e-9), cores, round_trip_s])
        )
    ]
    rate = _typical_rate([rate for rate, _, _ in found], nodes)
    straight = _straight_chunk_bytes(rate, max(round_trip for _, _, round_trip in found), len(nodes))
    if num_bytes < _SMALLEST_BYTES or rate < _FAST_BYTES_PER_S:
        return Links(None, straight)
    return Links(max(2, int(min(cores for _, cores, _ in found) / _CORES_PER_LANE)), straight)


def _straight_chunk_bytes(rate: float, round_trip_s: float, num_nodes: int) -> int:
    # Rank 0 sends to so many ranks at a time. A small broadcast seems slower than it is, and leaves sums to the ring.
    link_rate = rate * math.ceil(math.log2(num_nodes))
    return max(STRAIGHT_CHUNK_BYTES, int(_STRAIGHT_SHARE * link_rate * round_trip_s / 2))


def _round_trip_s(team: Team) -> float:
    """To the store, which lives on rank 0's host as a rule."""
    found = []
    for _ in range(_ROUND_TRIPS):
        started = time.perf_counter()
        team.store.check(["round trip"])
        found.append(time.perf_counter() - started)
    return min(found)


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

"""Link probe: what the first broadcast, a ring of sends and the store's round trip say about the links, for plain sums.

Several flows hide latency and the pauses between gloo's hops. Where the network is so fast that the CPU is the limit,
they only compete for cores. And how much a link holds says from which size on a sum goes from rank to rank.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bagua.comm.groups import STRAIGHT_CHUNK_BYTES, Groups
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team
from bagua.comm.transport import FAR_S, FAST_BYTES_PER_S, SMALLEST_BYTES, slow_bytes_per_s
from bagua.engine.startup.ring_rate import RingRate, measure_ring

__all__ = ["Links", "probe_links"]

_CORES_PER_LANE = 2  # gloo's own thread and ours
_ROUND_TRIPS = 3
# Over the number of ranks, of what a link holds in one latency. Straight to their owners, chunks take 2 latencies
# instead of 2 (R - 1), but all senders meet in the receivers' links, and each peer's message wakes a thread. 4 hosts
# were even at half, 8 hosts faster straight at a quarter, 16 hosts far slower straight at a half.
_STRAIGHT_SHARE = 2.0
_log = logging.getLogger("bagua")


@dataclass(frozen=True)
class Links:
    """What was found; the same on all ranks. It changes no bit of a result.

    Attributes:
        lanes_of_sums: how many lanes plain sums should share where the links are faster than the CPU, at least 2: one
            divides and copies while the other one sends. None: they are not, or it is not known.
        slow: one flow fills them; False: it does not, or it is not known.
        straight_chunk_bytes: see `Group`.
        bdp_bytes: see `EngineConfig`.
        round_trip_s: from the farthest rank to rank 0 and back; 0.0: not measured.
        held_bytes: what a link holds in one latency; 0.0: not measured.
    """

    lanes_of_sums: int | None = None
    straight_chunk_bytes: int = STRAIGHT_CHUNK_BYTES
    bdp_bytes: int = 0
    round_trip_s: float = 0.0
    held_bytes: float = 0.0
    slow: bool = False


def probe_links(
    team: Team, groups: Groups, num_bytes: int, broadcast: Callable[[], None], device: torch.device
) -> Links:
    """Run `broadcast`, which brings `num_bytes` from rank 0 to each rank. Collective.

    Args:
        groups: of the lane that broadcasts.
        device: of the tensors that they exchange.

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
    nodes = team.nodes or groups.nodes  # hosts, not sites: cores and network cards are shared by their ranks
    ranks_here = next(len(node) for node in nodes if team.rank in node)
    cores = usable_cores() / ranks_here
    found = [
        decode(message)
        for message in team.all_gather_bytes(
            "measured links", encode([num_bytes / max(seconds, 1e-9), cores, round_trip_s])
        )
    ]
    longest_s = max(round_trip for _, _, round_trip in found)
    ring = measure_ring(team, groups, device, longest_s)
    straight = _straight_chunk_bytes(ring, longest_s, team.size if groups.world.direct else len(groups.nodes))
    if team.rank == 0 and ring.nbytes:
        _log.info("%s", _told(ring, longest_s, straight, team.size))
    rate = _typical_rate([rate for rate, _, _ in found], nodes)
    held = ring.bytes_per_s * longest_s / 2
    bdp = int(held) if longest_s >= FAR_S else 0
    held = held if team.size > 2 else 0.0  # two ranks swap: their lanes wait for one latency only
    if num_bytes < SMALLEST_BYTES or rate < FAST_BYTES_PER_S:
        return Links(None, straight, bdp, longest_s, held, slow=rate < slow_bytes_per_s(num_bytes))
    lanes = max(2, int(min(cores for _, cores, _ in found) / _CORES_PER_LANE))
    return Links(lanes, straight, bdp, longest_s, held)


def _straight_chunk_bytes(ring: RingRate, round_trip_s: float, size: int) -> int:
    share = _STRAIGHT_SHARE / max(size, 4)
    return max(STRAIGHT_CHUNK_BYTES, int(share * ring.bytes_per_s * round_trip_s / 2))


def _told(ring: RingRate, round_trip_s: float, straight: int, size: int) -> str:
    straight_kib = f"{straight / 1024:.0f} KiB"
    so = f", so chunks of small sums go straight up to {straight_kib}" if size > 2 else ""
    return (
        f"links: {8e-6 * ring.bytes_per_s:.0f} Mbit/s from each rank to the next while all send, "
        f"{1000 * round_trip_s:.1f} ms to rank 0 and back{so}; "
        f"measured in {ring.seconds:.2f} s with {ring.nbytes / 2**20:.1f} MiB a rank"
    )


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

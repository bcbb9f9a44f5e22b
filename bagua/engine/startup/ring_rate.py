"""Rate of the links while all ranks use them: each sends to the next one in a ring, as the sums will.

The rate of one pair at a time says less: ranks share cores, switches and ways out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bagua.comm.groups import Group, Groups
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team
from bagua.comm.transport import FAR_S

__all__ = ["MOST_BYTES", "RingRate", "measure_ring"]

_FIRST_BYTES = 64 * 2**10
_GROWTH = 4
_ROUNDS = 4
MOST_BYTES = _FIRST_BYTES * sum(_GROWTH**k for k in range(_ROUNDS))  # that a rank sends, but for some heads of rounds
# A round says enough of the rate if it takes so long, and so many round trips, in which TCP finds its window. So each
# takes at most some four times as long as this, unless the first bytes do already.
_LONG_ENOUGH_S = 0.05
_TRIPS = 3
# Times the median: more than noise, mostly. To take equal links for unequal costs a latency in some sums; to take
# unequal ones for equal sends small sums several times over the slow link.
_UNEQUAL = 2.0
_HEAD_BYTES = 64
_TAG = 0


@dataclass(frozen=True)
class RingRate:
    """What was measured.

    Attributes:
        bytes_per_s: from a rank to the next one, the same on all: median over the ranks, or the least where one is so
            slow that links are unequal, as between sites; 0.0: there is no ring.
        nbytes: sent by each rank of the ring.
        seconds: that it took on this rank.

    Examples:
        >>> from bagua.engine.startup.ring_rate import RingRate
        >>> RingRate().bytes_per_s
        0.0
    """

    bytes_per_s: float = 0.0
    nbytes: int = 0
    seconds: float = 0.0


def measure_ring(team: Team, groups: Groups, device: torch.device, round_trip_s: float) -> RingRate:
    """Measure in at most four rounds, each of four times the bytes of the one before. Collective over the team.

    The last round counts. Where there is no group whose small sums may take a ring of sends, nor two ranks far from
    each other, nothing is sent.

    Args:
        groups: of one lane; idle.
        device: of the tensors that its groups exchange.
        round_trip_s: the same on all ranks.

    Raises:
        CommunicationError: a rank is lost.
    """
    ring, measured = _ring_of(groups, round_trip_s)
    if not measured:
        return RingRate()
    started, nbytes, rate = time.perf_counter(), 0, 0.0
    for number in range(_ROUNDS):
        size = _FIRST_BYTES * _GROWTH**number
        mine_s = _pass_on(ring, size, device) if ring is not None else None
        found = [decode(each) for each in team.all_gather_bytes("rate of the ring", encode(mine_s))]
        took_s = _typical_s([each for each in found if each is not None])
        nbytes, rate = nbytes + size, size / took_s
        if took_s >= max(_LONG_ENOUGH_S, _TRIPS * round_trip_s):
            break
    return RingRate(rate, nbytes, time.perf_counter() - started)


def _typical_s(seconds: Sequence[float]) -> float:
    median_s, longest_s = statistics.median(seconds), max(seconds)
    return max(longest_s if longest_s > _UNEQUAL * median_s else median_s, 1e-6)


def _ring_of(groups: Groups, round_trip_s: float) -> tuple[Group | None, bool]:
    """The group whose small sums go over sends, or two ranks far from each other; and whether there is one.

    The group is None on ranks that are not in it.
    """
    pair = groups.world.backend == "gloo" and groups.size == len(groups.nodes) == 2 and round_trip_s >= FAR_S
    if groups.world.direct or pair:
        return groups.world, True
    if groups.intra is None or len(groups.nodes) <= 2:
        return None, False
    return groups.inter, groups.world.backend == "gloo"


def _pass_on(ring: Group, nbytes: int, device: torch.device) -> float:
    """Send `nbytes` to the rank before and receive as many from the next one; returns seconds of their arrival.

    The clock starts when a first few bytes have come, so neither a latency nor a rank that begins late counts.
    """
    to, source = (ring.rank - 1) % ring.size, (ring.rank + 1) % ring.size  # as in `comm.ring`
    out, come = (torch.zeros(_HEAD_BYTES + nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    parts = slice(0, _HEAD_BYTES), slice(_HEAD_BYTES, None)
    receives = [ring.recv(come[part], source, _TAG) for part in parts]
    sends = [ring.send(out[part], to, _TAG) for part in parts]
    ring.wait(receives[0])
    started = time.perf_counter()
    ring.wait(receives[1])
    seconds = time.perf_counter() - started
    for each in sends:
        ring.wait(each)
    return seconds

"""How far the clocks of hosts are from rank 0's, through the store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team

__all__ = ["Skew", "measure_clocks"]

_TIMES = 5


@dataclass(frozen=True)
class Skew:
    """The clock of a host.

    Attributes:
        seconds: that it is ahead of rank 0's; negative if it is behind.
        error_s: by which that may be wrong: half of the fastest round trip through the store.
    """

    seconds: float
    error_s: float

    @property
    def least_s(self) -> float:
        """The smallest distance that the measurement allows for."""
        return max(abs(self.seconds) - self.error_s, 0.0)


def measure_clocks(team: Team, leaders: Sequence[int]) -> list[Skew]:
    """Compare the clocks of `leaders` with that of the first of them, rank 0; returns them there. Collective.

    Rank 0 asks one host after the other. It takes the answer of the fastest round trip, as NTP does
    (RFC 5905, section 10).

    Raises:
        CommunicationError: a rank does not answer.
    """
    if team.rank == 0:
        return [Skew(0.0, 0.0), *(_ask(team, each) for each in leaders[1:])]
    if team.rank in leaders:
        for turn in range(_TIMES):
            team.store.get(f"clock/{team.rank}/{turn}/question")
            team.store.set(f"clock/{team.rank}/{turn}/answer", encode(time.time()))
    return []


def _ask(team: Team, rank: int) -> Skew:
    found: list[Skew] = []
    for turn in range(_TIMES):
        before = time.time()
        team.store.set(f"clock/{rank}/{turn}/question", b"?")
        answer = decode(team.store.get(f"clock/{rank}/{turn}/answer"))
        after = time.time()
        found.append(Skew(answer - (before + after) / 2, (after - before) / 2))
    return min(found, key=lambda each: each.error_s)

"""The ring: both neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.topologies.base import Topology

__all__ = ["Ring"]


@dataclass(frozen=True)
class Ring(Topology):
    """Both neighbours with weight 1/3 each; of two ranks the other one with weight 1/2, the mean.

    Source: arXiv:1705.09056 (D-PSGD), section 5; the same weights as Bagua 0.9's low-precision decentralized.
    Differs: Bagua 0.9 counts the one neighbour of two ranks twice (2/3), so they overshoot their mean.

    Examples:
        >>> sorted(peer for peer, weight in bagua.topologies.Ring().peers(rank=0, size=8, step=0))
        [1, 7]
    """

    name: ClassVar[str] = "ring"
    fixed: ClassVar[bool] = True

    def peers(self, rank: int, size: int, step: int) -> tuple[tuple[int, float], ...]:
        """The left and the right neighbour, weight 1/3 each; the only neighbour, weight 1/2."""
        if size == 1:
            return ()
        left, right = (rank - 1) % size, (rank + 1) % size
        if left == right:
            return ((left, 0.5),)
        return ((left, 1.0 / 3.0), (right, 1.0 / 3.0))

    def period(self, size: int) -> int:
        """One: the matrix never changes."""
        return 1

"""The ring: both neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.topologies.base import Topology

__all__ = ["Ring"]


@dataclass(frozen=True)
class Ring(Topology):
    """Both neighbours with weight 1/3 each; with two ranks both neighbours are the same one (2/3).

    Source: arXiv:1705.09056 (D-PSGD), section 5; the same weights as Bagua 0.9's low-precision decentralized.

    Examples:
        >>> sorted(peer for peer, weight in bagua.topologies.Ring().peers(rank=0, size=8, step=0))
        [1, 7]
    """

    name: ClassVar[str] = "ring"
    fixed: ClassVar[bool] = True

    def peers(self, rank: int, size: int, step: int) -> tuple[tuple[int, float], ...]:
        """The left and the right neighbour, weight 1/3 each."""
        if size == 1:
            return ()
        left, right = (rank - 1) % size, (rank + 1) % size
        if left == right:
            return ((left, 2.0 / 3.0),)
        return ((left, 1.0 / 3.0), (right, 1.0 / 3.0))

    def period(self, size: int) -> int:
        """One: the matrix never changes."""
        return 1

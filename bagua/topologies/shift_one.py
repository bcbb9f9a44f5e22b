"""Shift-one: pairs of ranks that change at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.topologies.base import Topology

__all__ = ["ShiftOne"]


@dataclass(frozen=True)
class ShiftOne(Topology):
    """Ranks average in pairs, with another partner at every step.

    An even number of ranks: the lower half is paired with the upper half, shifted by one each step, as in Bagua 0.9
    (which refuses odd numbers). An odd number: at step c rank r is paired with (c - r) mod size, and the one rank that
    would be paired with itself skips the step; each rank skips once in `size` steps.

    Source: Bagua 0.9's `shift_one` peer selection mode.
    Differs: odd numbers of ranks work.

    Examples:
        >>> [bagua.topologies.ShiftOne().peers(rank=0, size=4, step=step) for step in range(2)]
        [((2, 0.5),), ((3, 0.5),)]
    """

    name: ClassVar[str] = "shift_one"

    def peers(self, rank: int, size: int, step: int) -> tuple[tuple[int, float], ...]:
        """The partner of this step with weight 1/2, or nobody."""
        if size == 1:
            return ()
        half = size // 2
        if size % 2:
            peer = (step - rank) % size
            return () if peer == rank else ((peer, 0.5),)
        if rank < half:
            return (((step + rank) % half + half, 0.5),)
        return (((rank - half - step) % half, 0.5),)

    def period(self, size: int) -> int:
        """Half the size for an even number of ranks, else the size."""
        return size if size % 2 else max(1, size // 2)

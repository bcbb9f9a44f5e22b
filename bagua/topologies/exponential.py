"""Exponential: one peer at a distance of a power of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.topologies.base import Topology

__all__ = ["Exponential"]


@dataclass(frozen=True)
class Exponential(Topology):
    """At step c every rank receives from the rank 2^(c mod k) before it and sends to the rank equally far after it.

    With a power of two of ranks, k = log2(size) steps give the exact mean. Directed: a rank does not send to the
    rank that it receives from.

    Source: arXiv:2110.13363 (one-peer exponential graphs), section 4.

    Examples:
        >>> [bagua.topologies.Exponential().peers(rank=0, size=8, step=step) for step in range(3)]
        [((7, 0.5),), ((6, 0.5),), ((4, 0.5),)]
    """

    name: ClassVar[str] = "exponential"

    def peers(self, rank: int, size: int, step: int) -> tuple[tuple[int, float], ...]:
        """The one sender of this step, weight 1/2."""
        if size == 1:
            return ()
        return (((rank - 2 ** (step % self.period(size))) % size, 0.5),)

    def period(self, size: int) -> int:
        """log2 of the size, rounded up."""
        return max(1, (size - 1).bit_length())

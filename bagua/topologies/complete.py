"""The complete topology: every rank with every other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.topologies.base import Topology

__all__ = ["Complete"]


@dataclass(frozen=True)
class Complete(Topology):
    """The mean of all ranks at every step.

    Examples:
        >>> bagua.topologies.Complete().matrix(size=2, step=0)
        [[0.5, 0.5], [0.5, 0.5]]
    """

    name: ClassVar[str] = "complete"
    complete: ClassVar[bool] = True
    fixed: ClassVar[bool] = True

    def peers(self, rank: int, size: int, step: int) -> tuple[tuple[int, float], ...]:
        """All other ranks, each with weight 1/size."""
        return tuple((peer, 1.0 / size) for peer in range(size) if peer != rank)

    def period(self, size: int) -> int:
        """One: the matrix never changes."""
        return 1

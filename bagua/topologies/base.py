"""The interface of all topologies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology(ABC):
    """A mixing matrix for every step.

    Attributes:
        name: the registry name.
        complete: every rank mixes with every other, with equal weights.
        fixed: the peers are the same at every step, so that each may keep a copy of the other's values.
    """

    name: ClassVar[str]
    complete: ClassVar[bool] = False
    fixed: ClassVar[bool] = False

    @abstractmethod
    def peers(self, rank: int, size: int, step: int) -> tuple[tuple[int, float], ...]:
        """Return (peer, weight) for each rank whose values `rank` mixes in at `step`; its own weight is the rest."""

    @abstractmethod
    def period(self, size: int) -> int:
        """Return after how many steps the sequence of matrices starts over."""

    def receivers(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        """Return the ranks that mix in the values of `rank` at `step`: those it sends to."""
        return tuple(other for other in range(size) if any(peer == rank for peer, _ in self.peers(other, size, step)))

    def matrix(self, size: int, step: int) -> list[list[float]]:
        """Return the [size, size] mixing matrix of `step`, row = receiver."""
        rows = []
        for rank in range(size):
            row = [0.0] * size
            for peer, weight in self.peers(rank, size, step):
                row[peer] += weight
            row[rank] += 1.0 - sum(row)
            rows.append(row)
        return rows

"""Groups of ranks as an exchange sees them: the world, the ranks of my node, the leaders of the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bagua.comm.buffers import Buffers

__all__ = ["Group", "Groups", "Meter"]


@dataclass
class Meter:
    """Bytes that this rank's collectives put on and took off the wire. Only the lane that owns it writes it."""

    sent: int = 0
    received: int = 0

    def add(self, sent: float, received: float) -> None:
        """Count one transfer; fractions of a byte (a formula's R-th part) are dropped."""
        self.sent += int(sent)
        self.received += int(received)


@dataclass(eq=False)
class Group:
    """One process group of one lane. Two threads never share one.

    Attributes:
        pg: a `torch.distributed` backend (gloo or NCCL) or anything with its methods; None if `size` is 1.
        rank: my rank within the group.
        size: number of ranks.
        ranks: the members as ranks of the team, in group order.
        backend: "gloo", "nccl", or "local" (ranks that take turns in one process).
        meter: where bytes are counted.
    """

    pg: Any
    rank: int
    size: int
    ranks: tuple[int, ...]
    backend: str = "gloo"
    meter: Meter = field(default_factory=Meter)


@dataclass(eq=False)
class Groups:
    """What an exchange may talk to.

    Attributes:
        world: all ranks.
        nodes: ranks of the world by node, leaders first; every rank knows all of them.
        intra: the ranks of my node; None unless the groups were opened hierarchical.
        inter: the leaders of all nodes; None on ranks that lead no node, or unless hierarchical.
        buffers: scratch memory of the lane.
    """

    world: Group
    nodes: tuple[tuple[int, ...], ...]
    intra: Group | None = None
    inter: Group | None = None
    buffers: Buffers = field(default_factory=Buffers)

    @property
    def rank(self) -> int:
        """My rank in the world."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        return self.world.size

    @property
    def meters(self) -> Sequence[Meter]:
        """All meters, the world's first."""
        return [group.meter for group in (self.world, self.intra, self.inter) if group is not None]

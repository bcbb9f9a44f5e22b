"""Groups of ranks as an exchange sees them: the world, the ranks of my node, the leaders of the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bagua.comm.buffers import Buffers

__all__ = ["Group", "Groups", "Meter"]

_TAGS = 1 << 16  # of one lane
_LONG_HOP_S = 0.0005  # far above what loopback or a switch takes, so that a repeated run decides alike


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
        p2p: the backend for sends and receives, if not `pg`: lanes of one engine share connections for these, since
            a few busy flows fill a link better than many.
        tag: first of the tags that are this lane's on `p2p`.
        hop_s: time of a small message one way, the longest between members; 0 within a node or if not measured.
    """

    pg: Any
    rank: int
    size: int
    ranks: tuple[int, ...]
    backend: str = "gloo"
    meter: Meter = field(default_factory=Meter)
    p2p: Any = None
    tag: int = 0
    hop_s: float = 0.0

    def send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Begin to send a tensor; returns the work to wait for."""
        return (self.p2p or self.pg).send([tensor], peer, self.tag + tag)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Begin to receive a tensor; returns the work to wait for."""
        return (self.p2p or self.pg).recv([tensor], peer, self.tag + tag)

    @property
    def direct(self) -> bool:
        """Whether to send straight to the owner of a chunk where the backend would pass it on from rank to rank.

        gloo's all-reduce takes some 4 R messages one after the other, a direct exchange 3.
        """
        return self.backend == "gloo" and self.size > 2 and self.hop_s >= _LONG_HOP_S


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

    def know_hop(self, hop_s: float) -> None:
        """Set how long a message takes between nodes; within a node it stays 0."""
        self.world.hop_s = hop_s
        if self.inter is not None:
            self.inter.hop_s = hop_s

    def share_connections(self, other: Groups, lane: int) -> None:
        """Send and receive over the connections of `other`, the groups of another lane of the same engine."""
        for mine, theirs in ((self.world, other.world), (self.inter, other.inter), (self.intra, other.intra)):
            if mine is not None and theirs is not None:
                mine.p2p, mine.tag = theirs.pg, lane * _TAGS

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

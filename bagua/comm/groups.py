"""Groups of ranks for exchanges: the world, the ranks of this node, the leaders of the nodes."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bagua.comm.buffers import Buffers
from bagua.comm.gloo_connections import GlooConnections
from bagua.comm.mesh import Mesh
from bagua.errors import CommunicationError

__all__ = ["STRAIGHT_CHUNK_BYTES", "Group", "Groups", "Meter"]

_TAGS = 1 << 16  # of one lane
_ABORT_S = 10.0  # for NCCL to abort and its kernels to end
STRAIGHT_CHUNK_BYTES = 64 * 2**10  # so small a chunk costs latency only, even where all senders meet


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
        rank: this process's rank within the group.
        size: number of ranks.
        ranks: the members as ranks of the team, in group order.
        backend: "gloo", "nccl", or "local" (ranks that take turns in one process).
        meter: where bytes are counted.
        p2p: the backend for sends and receives, if not `pg`: lanes of one engine share connections for these, since
            a few busy flows fill a link better than many.
        tag: first of the tags that are this lane's on `p2p`.
        direct: small sums may go over sends of the library's own. A property of the nodes and never measured, so that
            a repeated run sums 16-bit numbers in the same order.
        straight_chunk_bytes: such a sum goes straight to the owners of chunks up to chunks of this size, and from rank
            to rank if they are larger. Equal on all ranks; changes no bit.
        of_hosts: the ranks are on different hosts of a site, over gloo: all of their network cards take part in sums
            on the first rank and in its broadcasts.
        gathers: each rank forms the means or sums of the exchange that runs from all summands, in one latency, where
            the exchange can. To have an owner of each part form it takes two, and 2 (R-1)/R of the bytes instead of
            R-1 times. Equal on all ranks; changes no bit.
        connections: of gloo, where a loss can have to free what waits.
        address: at which gloo listens, if it was looked for.
        abortable: `pg` is an `AbortableNccl`, or would be if there were other ranks: collectives are over when they
            have been waited for.
        mesh: of the native transport, which then carries what `pipelined` and `collectives` say; None: gloo does.
        waits_since: when the lane's thread began to wait for the transfer that it waits for; None: it does not wait.
            Known if there are `connections`, or if `abortable`.
    """

    pg: Any
    rank: int
    size: int
    ranks: tuple[int, ...]
    backend: str = "gloo"
    meter: Meter = field(default_factory=Meter)
    p2p: Any = None
    tag: int = 0
    direct: bool = False
    straight_chunk_bytes: int = STRAIGHT_CHUNK_BYTES
    of_hosts: bool = False
    gathers: bool = False
    connections: GlooConnections | None = None
    address: str | None = None
    abortable: bool = False
    mesh: Mesh | None = None
    waits_since: float | None = None
    _left: bool = False

    def wait(self, work: Any) -> None:
        """Wait for a collective or a transfer of this group.

        Raises:
            CommunicationError: the wait was given up meanwhile, see `give_up_wait`.
        """
        if self.connections is None and not self.abortable:
            work.wait()
            return
        self.waits_since = time.monotonic()
        try:
            work.wait()
        finally:
            self.waits_since = None
        if self._left:
            raise CommunicationError("the connections of this group were cut")

    def give_up_wait(self, cut: float, after_s: float) -> bool:
        """From another thread: whether the lane's thread is held by a transfer that a cut has not ended.

        gloo does not wake who waits for a message of which a part has come or gone when its connection is cut; that
        ends at the timeout. If this returns True, the thread raises when it does, whatever has come: it touches no
        tensor any more.

        Args:
            cut: when the connections were cut (`time.monotonic()`).
            after_s: for how long since then it must have waited.
        """
        since = self.waits_since
        after_s = max(after_s, _ABORT_S) if self.abortable else after_s  # a kernel may write to its tensors until then
        if since is None or time.monotonic() - max(since, cut) < after_s:
            return False
        self._left = True
        return self.waits_since is since  # else it looks at `_left` after the next wait at the latest

    def sever(self) -> None:
        """Cut the connections under collectives in flight, which then fail here and at the peers. From any thread."""
        pg = self.pg
        if self.mesh is not None:
            self.mesh.abort()
        if self.connections is not None:
            self.connections.shut_down()
        elif pg is not None and self.backend == "nccl":
            pg.abort()

    def leave(self, abort: bool) -> None:
        """Drop the connections. gloo closes them when no reference to the backend is left.

        Args:
            abort: on NCCL, end kernels that still wait for a peer. Without it they are awaited, and so are the peers:
                all members leave. Just dropping an NCCL backend would also abort it, with a warning, and cut what
                other ranks still receive.
        """
        if self.mesh is not None:
            self.mesh.close()
        pg, self.pg, self.p2p = self.pg, None, None
        if pg is not None and self.backend == "nccl":
            if abort:
                pg.abort()
            else:
                pg.shutdown()

    def send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Begin to send a tensor; returns the work to wait for."""
        return (self.p2p or self.pg).send([tensor], peer, self.tag + tag)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> Any:
        """Begin to receive a tensor; returns the work to wait for."""
        return (self.p2p or self.pg).recv([tensor], peer, self.tag + tag)


@dataclass(eq=False)
class Groups:
    """The groups and scratch memory of an exchange.

    Attributes:
        world: all ranks.
        nodes: ranks of the world by node, leaders first; every rank knows all of them. Where there are sites, by site.
        intra: the ranks of this node; None unless opened with hierarchical=True. Of this host, if it is one of several
            of its site and one of them has several ranks.
        site: the first ranks of the hosts of this site; None on other ranks, or unless `intra` is of a host.
        inter: the leaders of all nodes; None on other ranks, or unless hierarchical.
        column: of every site the host that has the same place in it as this one; `inter` on leaders. None on ranks that
            are not the first of a host, or unless all sites have the same number of hosts, over gloo, and several.
        buffers: scratch memory of the lane.
        or_gloo: the native transport is used only if it can be.
    """

    world: Group
    nodes: tuple[tuple[int, ...], ...]
    intra: Group | None = None
    inter: Group | None = None
    site: Group | None = None
    column: Group | None = None
    buffers: Buffers = field(default_factory=Buffers)
    or_gloo: bool = False

    def share_connections(self, other: Groups, lane: int) -> None:
        """Send and receive over the connections of `other`, the groups of another lane of the same engine."""
        for mine, theirs in zip(self._every(), other._every(), strict=True):  # of the same ranks
            if mine.backend == "nccl":  # a batch is of one communicator
                continue
            mine.p2p, mine.tag = theirs.pg, lane * _TAGS

    @property
    def native(self) -> bool:
        """Whether they have connections of the native transport."""
        return self.world.mesh is not None

    def begin(self, bucket: int, gathers: bool = False) -> None:
        """The next exchange is one of this bucket; see `Group.gathers`."""
        for group in self.between:
            group.gathers = gathers
            if group.mesh is not None:
                group.mesh.bucket = bucket

    def as_of(self, gathers: bool) -> Groups:
        """These groups as an exchange that gathers finds them, or one that does not. To look at, not to use."""
        seen = copy.copy(self)
        seen.world, seen.inter = copy.copy(self.world), copy.copy(self.inter)
        seen.column = seen.inter if self.column is self.inter else copy.copy(self.column)
        for group in seen.between:
            group.gathers = gathers
        return seen

    def sever(self) -> None:
        """Cut all connections; see `Group.sever`."""
        for group in self._every():
            group.sever()

    def give_up_wait(self, cut: float, after_s: float) -> bool:
        """Whether one of them holds the lane's thread; see `Group.give_up_wait`."""
        return any(group.give_up_wait(cut, after_s) for group in self._every())

    def leave(self, abort: bool) -> None:
        """Give up the connections and the scratch memory; see `Group.leave`."""
        for group in self._every():
            group.leave(abort)
        self.buffers.clear()

    @property
    def rank(self) -> int:
        """This process's rank in the world."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        return self.world.size

    @property
    def meters(self) -> Sequence[Meter]:
        """All meters, the world's first."""
        return [group.meter for group in self._every()]

    @property
    def between(self) -> list[Group]:
        """Those in which nodes exchange, or all ranks."""
        return [group for group in (self.world, self.inter, self._other_column) if group is not None]

    @property
    def hosts(self) -> Group | None:
        """The first ranks of the hosts of this site, over gloo; None on other ranks, or if there are no sites."""
        return next((group for group in (self.site, self.intra) if group is not None and group.of_hosts), None)

    @property
    def _other_column(self) -> Group | None:
        return None if self.inter is not None else self.column

    def _every(self) -> list[Group]:
        every = (self.world, self.intra, self.site, self.inter, self._other_column)
        return [group for group in every if group is not None]

    @property
    def num_summed(self) -> int:
        """Ranks of this node, or site: those that are summed before an exchange between nodes."""
        rank = self.world.ranks[self.world.rank]
        return next(len(node) for node in self.nodes if rank in node)

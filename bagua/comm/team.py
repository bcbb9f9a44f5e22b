"""The ranks that train one model, and process groups for their lanes."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bagua.comm.abortable_nccl import AbortableNccl
from bagua.comm.backend_kind import backend_kind
from bagua.comm.connecting import LateGloo, connect_gloo, connect_nccl
from bagua.comm.flight_recorder import avoid_race
from bagua.comm.groups import Group, Groups
from bagua.comm.mesh_connect import MeshError, add_meshes
from bagua.comm.node_keys import Sites, by_node, by_site, node_key
from bagua.comm.staged import Staged
from bagua.comm.store import RendezvousStore
from bagua.comm.store_team import Counters, StoreTeam, is_loss
from bagua.errors import CommunicationError

avoid_race()

__all__ = ["Team"]

_log = logging.getLogger("bagua")

# By process group, not by its name: a later group of the same name has another store and starts at zero.
_counters: weakref.WeakKeyDictionary[Any, Counters] = weakref.WeakKeyDictionary()


@dataclass(eq=False)
class Team(StoreTeam):
    """All ranks of a process group, with a store that they share and a factory of process groups for lanes.

    Attributes:
        backend: "gloo", "nccl", or "local" (ranks that take turns in one process).
        name: the parent group's name, for messages.
        node: what `node_key()` says on this rank.
        nodes: ranks by node, if groups are made by site and a site may have several; else empty.
        staged: gloo groups carry CUDA tensors, through host memory.
        order: the ranks in the order in which they are members of the groups that `open` makes, and so of rings; rank 0
            is the first, and ranks of one node follow one another. All sums then take the ring. (): in the order of
            the ranks.
        routes: by pair of ranks, the lower one first, the rank through which the native transport connects them.
        prepared: groups that `open` will return, by name.
        device: of this rank; needed for NCCL with `alert`, whose groups are connected when they are opened.
    """

    backend: str = "gloo"
    name: str = "default"
    node: str = field(default_factory=node_key)
    staged: bool = False
    nodes: tuple[tuple[int, ...], ...] = ()
    prepared: dict[str, Groups] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    routes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    device: torch.device | None = None

    @classmethod
    def of(cls, process_group: Any, device: torch.device) -> Team:
        """Make the team of a `ProcessGroup` (None: the default one) or a one-dimensional `DeviceMesh`.

        A team is passed through, so that ranks can also be threads of one process, without a default group.

        Raises:
            RuntimeError: `torch.distributed` is not initialised.
            TypeError: `process_group` is neither.
            ValueError: the group has no backend for `device`, or this rank is not in it.
        """
        if isinstance(process_group, Team):
            return process_group
        if not dist.is_initialized():
            raise RuntimeError("no process group: call bagua.init_process_group() before bagua.distribute()")
        pg = process_group
        if pg is None:
            pg = dist.group.WORLD
        elif hasattr(pg, "get_group") and hasattr(pg, "ndim"):
            if pg.ndim != 1:
                raise ValueError(f"process_group: a DeviceMesh must have one dimension here, this one has {pg.ndim}")
            pg = pg.get_group()
        if pg is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"process_group: rank {dist.get_rank()} is not a member of the group")
        if not isinstance(pg, dist.ProcessGroup):
            raise TypeError(f"process_group: expected a ProcessGroup or DeviceMesh, got {type(process_group).__name__}")
        try:
            backend = pg._get_backend(device)
        except RuntimeError as error:
            raise ValueError(f"process_group: the group has no backend for {device.type} tensors ({error})") from error
        name = backend_kind(backend)
        if name not in ("gloo", "nccl"):
            raise ValueError(f"process_group: backend {name!r} is not supported, only gloo and nccl are")
        group_name = str(pg.group_name)
        store = dist.PrefixStore(f"bagua/{group_name}", dist.distributed_c10d._get_default_store())
        counters = _counters.setdefault(pg, Counters())
        staged = device.type == "cuda" and name == "gloo"
        timeout = backend.options._timeout
        return cls(pg.rank(), pg.size(), store, timeout, name, group_name, counters=counters, staged=staged)

    @classmethod
    def alone(cls) -> Team:
        """A team of this rank only, which needs no process group."""
        return cls(0, 1, dist.HashStore(), timedelta(seconds=60), name="alone")

    @contextmanager
    def naming_missing_ranks(self, what: str, key: str, groups: Groups) -> Iterator[None]:
        """Context manager: failed collectives raise `CommunicationError` with the missing ranks.

        Args:
            what: is done, for messages.
            key: new in the store and the same on all ranks.
            groups: that they use. An error drops them, which closes their connections, so that peers fail soon too.
        """
        try:
            yield
        except RuntimeError as error:
            groups.leave(abort=True)
            if not is_loss(error):
                raise
            gone = self.describe_missing(key, alert=self.alert)
            raise CommunicationError(f"{what} on rank {self.rank} of {self.size}: {error}{gone}") from error

    def arranged(self, order: tuple[int, ...], routes: Mapping[tuple[int, int], int]) -> Team:
        """This team with another `order` and other `routes`."""
        if order == self.order and routes == self.routes:
            return self
        made = copy.copy(self)
        made.order, made.routes = order, routes
        return made

    def next_lane(self) -> str:
        """Return a name for a new lane; equal on all ranks that have called it equally often."""
        self.counters.lanes += 1
        return str(self.counters.lanes)

    def open(
        self,
        name: str,
        hierarchical: bool = False,
        nodes: Sequence[Sequence[int]] | None = None,
        native: bool = False,
        or_gloo: bool = False,
        beside: Groups | None = None,
    ) -> Groups:
        """Make process groups for one lane. Collective over the team; `name` must be new and the same everywhere.

        Args:
            native: with connections of the native transport beside those of gloo.
            or_gloo: if not all ranks can be connected so, let gloo carry all. All ranks do, and rank 0 warns.
            beside: native groups of the same ranks, at whose addresses these listen. Those of gloo are connected when
                they are first used then, which most lanes never do: it takes some 30 round trips.

        Raises:
            CommunicationError: a rank is missing or cannot be connected.
        """
        if name in self.prepared:
            return self.prepared.pop(name)
        groups = self._open(name, hierarchical, nodes, native, or_gloo, beside)
        if native:
            self._add_meshes([groups], name)
        return groups

    def _open(
        self,
        name: str,
        hierarchical: bool,
        nodes: Sequence[Sequence[int]] | None,
        native: bool,
        or_gloo: bool,
        beside: Groups | None,
    ) -> Groups:
        late = beside.world.address if native and beside is not None else None
        members = self.order or tuple(range(self.size))
        kind = Sites if isinstance(nodes, Sites) else tuple
        nodes = kind(tuple(node) for node in nodes) if nodes else (tuple(range(self.size)),)
        # With several ranks a node, direct exchange would send the same sums through one network interface; and an
        # order is there since some links are slow, all of which it would use.
        alone = len(nodes) == self.size and not self.order
        world = self._group(f"{name}/world", members, direct=alone, native=native, late=late)
        groups = Groups(world, nodes, or_gloo=or_gloo)
        if hierarchical:
            mine = next(node for node in nodes if self.rank in node)
            leaders = tuple(sorted((node[0] for node in nodes), key=members.index))
            host = next((node for node in self.nodes if self.rank in node), mine)
            column, connect = self._column(nodes, leaders), partial(self._group, native=native, late=late)
            if len(host) < len(mine) and any(len(node) > 1 for node in self.nodes if set(node) < set(mine)):
                groups.intra = self._group(f"{name}/intra{host[0]}", host)
                if self.rank == host[0]:
                    hosts = tuple(node[0] for node in self.nodes if set(node) <= set(mine))
                    groups.site = self._group(f"{name}/site{mine[0]}", hosts, of_hosts=True)
            else:
                groups.intra = self._group(f"{name}/intra{mine[0]}", mine, of_hosts=len(host) < len(mine))
            if self.rank in leaders:
                groups.inter = connect(f"{name}/inter", leaders, direct=True)
            if column:
                groups.column = groups.inter or connect(f"{name}/column{column[0]}", column, direct=True)
        return groups

    def _column(self, nodes: Sequence[tuple[int, ...]], leaders: Sequence[int]) -> tuple[int, ...]:
        """Of each site the host whose place in it is that of this rank's host, in the order of `leaders`.

        Empty on ranks that are not the first of a host, and unless all sites have the same number of hosts, and
        several. Also where members can be lost: sites do not stay equal then.
        """
        if self.backend != "gloo" or self.alert is not None or len(nodes) < 2:
            return ()
        sites = [tuple(node[0] for node in self.nodes if set(node) <= set(site)) for site in nodes]
        if len(sites[0]) < 2 or len({len(site) for site in sites}) > 1:
            return ()
        place = next((site.index(self.rank) for site in sites if self.rank in site), None)
        if place is None:
            return ()
        return tuple(site[place] for leader in leaders for site in sites if site[0] == leader)

    def _add_meshes(self, lanes: Sequence[Groups], name: str) -> None:
        """Connect the ranks for the native transport. All `lanes` have the same `or_gloo`."""
        if self.size == 1:
            return

        def all_gather(stage: str, payload: bytes) -> list[bytes]:
            return self.all_gather_bytes_once(f"native transport of {name}", f"native/{name}/{stage}", payload)

        try:
            add_meshes(lanes, all_gather, self.timeout, self.alert, self.routes)
        except BaseException as error:
            if isinstance(error, MeshError) and lanes[0].or_gloo:
                if self.rank == 0:
                    _log.warning("%s; gloo carries all exchanges of %s", error, name)
                return
            for groups in lanes:
                groups.leave(abort=True)
            raise

    def prepare(
        self,
        names: Sequence[str],
        hierarchical: bool,
        nodes: Sequence[Sequence[int]],
        native: bool = False,
        or_gloo: bool = False,
        beside: Groups | None = None,
    ) -> None:
        """Open groups now that `open` will return later, without waiting for anybody then. Collective.

        Args:
            hierarchical, nodes, native, or_gloo, beside: see `open`. Default of `beside`: the first of these.
        """
        for name in names:
            self.prepared[name] = self._open(name, hierarchical, nodes, native, or_gloo, beside)
            beside = beside or self.prepared[name]
        if native:
            self._add_meshes([self.prepared[name] for name in names], names[0])

    def discover_nodes(self, keys: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Sort the ranks by node: `keys` holds `node_key()` of each rank. First rank of a node = its leader."""
        return by_node(keys)

    def discover_sites(self, keys: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """As `discover_nodes`, but by site, if there are several. Groups that are opened later know the nodes, too.

        Raises:
            RankMismatchError: some ranks have a site and others none; names the first of those.
        """
        nodes, sites = by_node(keys), by_site(keys)
        self.nodes = nodes if sites else ()
        return sites or nodes

    def _group(
        self,
        name: str,
        ranks: tuple[int, ...],
        *,
        direct: bool = False,
        native: bool = False,
        late: str | None = None,
        of_hosts: bool = False,
    ) -> Group:
        rank, size = ranks.index(self.rank), len(ranks)
        abortable = self.backend == "nccl" and self.alert is not None
        if size == 1:
            return Group(None, rank, size, ranks, self.backend, abortable=abortable)
        if abortable:
            return Group(self._connect_nccl(name, ranks), rank, size, ranks, self.backend, abortable=True)
        rendezvous: RendezvousStore | None = None
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            pg = dist.ProcessGroupNCCL(self.store.under(f"group/{name}").unbounded, rank, size, options)
        else:
            rendezvous = RendezvousStore(self.store.under(f"group/{name}"), ranks, self.alert, finds=native)
            if late is not None and not self.staged:
                team = copy.copy(self)
                team.prepared = {}  # it may hold this group, which would be a cycle
                pg: Any = LateGloo(partial(team._connect_late, name, ranks, rendezvous))
            else:
                pg = self._connect_gloo(name, ranks, rendezvous)
                self.retire([f"group/{name}/{key}" for key in rendezvous.written])
                pg = Staged(pg) if self.staged else pg
        direct = direct and self.backend == "gloo" and size > 2
        connections = rendezvous.connections if rendezvous is not None else None
        address = late or (connections.own if connections is not None else None)
        connections = connections if self.alert is not None else None  # else nobody cuts them
        group = Group(pg, rank, size, ranks, self.backend, direct=direct, connections=connections, address=address)
        group.of_hosts = of_hosts and self.backend == "gloo"
        return group

    def _connect_gloo(self, name: str, ranks: tuple[int, ...], rendezvous: RendezvousStore) -> Any:
        try:
            return connect_gloo(rendezvous, ranks.index(self.rank), len(ranks), self.timeout, self.alert)
        except RuntimeError as error:
            if self.alert is not None:
                self.alert()  # it knows better why
            # A lost rank is noticed by others a moment later than by its connections.
            gone = self.describe_missing(f"unconnected/{name}", alert=self.alert)
            raise CommunicationError(f"ranks {ranks}: connecting over gloo failed: {error}{gone}") from error

    def _connect_nccl(self, name: str, ranks: tuple[int, ...]) -> AbortableNccl:
        assert self.alert is not None and self.device is not None
        store = self.store.under(f"group/{name}")
        rendezvous = RendezvousStore(store, ranks, self.alert)
        try:
            made = connect_nccl(
                rendezvous, store.unbounded, ranks.index(self.rank), len(ranks), self.timeout, self.device, self.alert
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.alert()  # it knows better why
            raise CommunicationError(f"ranks {ranks}: connecting over NCCL failed: {error}") from error
        self.retire([f"group/{name}/{key}" for key in rendezvous.written])
        return made

    def _connect_late(self, name: str, ranks: tuple[int, ...], rendezvous: RendezvousStore) -> Any:
        pg = self._connect_gloo(name, ranks, rendezvous)
        # Beside other collectives. All ranks are connected, so they have read what this one has written.
        self._delete([f"group/{name}/{key}" for key in rendezvous.written])
        return pg

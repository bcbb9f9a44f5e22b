"""Communicators for scripts: a set of ranks, its members on this node, and the first member of every node.

Made with nothing but a store, so that only members take part. A communicator's gloo group is opened when it
is made, which is collective among its members; its NCCL group when the first CUDA tensor comes.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua.comm.backend_kind import backend_kind
from bagua.comm.groups import Group
from bagua.comm.node_keys import node_key
from bagua.comm.primitives import barrier
from bagua.comm.store_team import Counters, decode, encode
from bagua.comm.team import Team
from bagua.errors import CommunicationError

__all__ = ["Communicator", "RankSet", "default_rank_set", "new_rank_set", "rank_set_of"]

_CPU = torch.device("cpu")


class Communicator:
    """A set of ranks that communicate over gloo (CPU tensors) and NCCL (CUDA tensors).

    If the default process group carries CUDA tensors over gloo, so does a communicator, through host memory.

    Attributes:
        rank: this process's rank among them.
        ranks: the members, as ranks of the default process group.
        stream: a CUDA stream to communicate on; None means the current one.
    """

    def __init__(
        self, ranks: tuple[int, ...], rank: int, store: Any, timeout: timedelta, name: str, stream: Any = None
    ) -> None:
        self.ranks, self.rank, self.name, self.stream = ranks, rank, name, stream
        self._store, self._timeout = store, timeout
        self._groups: dict[str, Group] = {}
        self._counters: dict[str, Counters] = {}
        self._aborted = False
        self.group(_CPU)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def aborted(self) -> bool:
        """Whether `abort` was called on this rank."""
        return self._aborted

    def group(self, device: torch.device) -> Group:
        """Return the group for tensors on `device`.

        Raises:
            ValueError: neither a CPU nor a CUDA device.
        """
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device: tensors on {device} cannot be communicated, only on cpu and cuda")
        group = self._groups.get(device.type)
        if group is None:
            team = self.team(device)
            group = self._groups[device.type] = team.open("all").world
            if device.type == "cpu":
                barrier(group)  # after it all members are connected, and have read what each had written for that
                team.delete_retired()
        return group

    def team(self, device: torch.device = _CPU) -> Team:
        """The members as a team that shares the store, with groups for tensors on `device`."""
        backend, staged = ("gloo", False) if device.type == "cpu" else _on_gpus(device)
        prefix = f"{device.type} {backend}" if staged else backend
        store, counters = dist.PrefixStore(prefix, self._store), self._counters.setdefault(prefix, Counters())
        return Team(self.rank, self.size, store, self._timeout, backend, self.name, counters=counters, staged=staged)

    @contextmanager
    def on(self, device: torch.device, what: str) -> Iterator[Group]:
        """Lend the group for tensors on `device`, on the communicator's stream if it has one.

        Args:
            device: where the tensors are.
            what: the operation, for messages.

        Raises:
            CommunicationError: the communicator was aborted, or the operation failed.
        """
        if self._aborted:
            raise CommunicationError(f"{what}: communicator {self.name} was aborted")
        try:
            group = self.group(device)
            if device.type != "cuda" or self.stream is None:
                yield group
                return
            current = torch.cuda.current_stream(device)
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                yield group
            current.wait_stream(self.stream)
        except RuntimeError as error:
            if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
                raise  # out of memory and the like are what they are
            raise CommunicationError(
                f"{what} on rank {self.rank} of {self.size}, communicator {self.name}: {error}"
            ) from error

    def barrier(self) -> None:
        """Barrier: return when all members have called it and this rank's queued GPU work is done.

        Raises:
            CommunicationError: as `on`.
        """
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        with self.on(_CPU, "barrier") as group:
            barrier(group)

    def abort(self) -> None:
        """Refuse all further operations and drop the groups, so that peers fail soon too. Repeating is safe.

        A gloo operation that is already waiting for its peers ends only when they answer or exit, or at the
        timeout.
        """
        self._aborted = True
        for group in self._groups.values():
            if group.pg is not None:
                group.pg.abort()
                group.pg = None
        self._groups.clear()


class RankSet:
    """Ranks of the default process group with up to three communicators, made on first use.

    Attributes:
        ranks: the members, in the order of their ranks in this set.
        rank: this process's rank among them; None if it is not a member.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        store: Any,
        timeout: timedelta,
        name: str,
        stream: Any,
        process_group: Any = None,
    ) -> None:
        me = dist.get_rank()
        self.ranks, self.name, self.stream = tuple(ranks), name, stream
        self.rank = self.ranks.index(me) if me in self.ranks else None
        self._store, self._timeout = store, timeout
        # A strong reference would keep the default group alive after its end: see `_defaults`.
        self._process_group = weakref.ref(process_group) if process_group is not None else None
        self._made: dict[str, Communicator | None] = {}
        self._nodes: tuple[tuple[int, ...], ...] | None = None

    def world(self) -> Communicator | None:
        """All members; None if this rank is not one. Collective on first use."""
        return self._get("world", self.ranks)

    def intra(self) -> Communicator | None:
        """The members on this node. Collective among all members on first use."""
        if self.rank is None:
            return None
        mine = next(node for node in self._by_node() if self.rank in node)
        return self._get(f"intra{mine[0]}", [self.ranks[index] for index in mine])

    def inter(self) -> Communicator | None:
        """The first member of every node; None on the others. Collective among all members on first use."""
        if self.rank is None:
            return None
        return self._get("inter", [self.ranks[node[0]] for node in self._by_node()])

    def process_group(self) -> dist.ProcessGroup:
        """These ranks as a group of `torch.distributed`. Collective among the members on first use.

        Raises:
            ValueError: this rank is not a member.
        """
        known = self._process_group() if self._process_group is not None else None
        if known is not None:
            return known
        if self.rank is None:
            raise ValueError(f"process_group: rank {dist.get_rank()} is not one of its ranks {list(self.ranks)}")
        made = dist.new_group(list(self.ranks), timeout=self._timeout, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        self._process_group = weakref.ref(made)
        return made

    def _by_node(self) -> tuple[tuple[int, ...], ...]:
        if self._nodes is None:
            world = self.world()
            assert world is not None
            team = world.team()
            keys = [decode(message) for message in team.all_gather_bytes("discovery of nodes", encode(node_key()))]
            self._nodes = team.discover_nodes(keys)
        return self._nodes

    def _get(self, kind: str, ranks: Sequence[int]) -> Communicator | None:
        if kind not in self._made:
            me = dist.get_rank()
            self._made[kind] = None
            if me in ranks:
                store = dist.PrefixStore(kind, self._store)
                name = self.name if kind == "world" else f"{self.name}/{kind}"
                self._made[kind] = Communicator(
                    tuple(ranks), list(ranks).index(me), store, self._timeout, name, self.stream
                )
        return self._made[kind]


# By process group: a later default group has another store, and numbers start over on all ranks alike.
_serials: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()
_defaults: weakref.WeakKeyDictionary[Any, RankSet] = weakref.WeakKeyDictionary()


def default_rank_set() -> RankSet:
    """All ranks. One object as long as the default process group lives.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
    """
    world = _world()
    if world not in _defaults:
        _defaults[world] = RankSet(range(world.size()), *_base(world, "default"), None, world)
    return _defaults[world]


def new_rank_set(ranks: Sequence[int] | None = None, stream: Any = None) -> RankSet:
    """Return a set of `ranks` (None: all). Every rank, member or not, must make its sets in the same order.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
        ValueError: not ranks of the default process group, or some twice, or none.
    """
    world = _world()
    chosen = list(range(world.size())) if ranks is None else sorted(int(rank) for rank in ranks)
    if not chosen or len(set(chosen)) != len(chosen) or chosen[0] < 0 or chosen[-1] >= world.size():
        raise ValueError(f"ranks: expected distinct ranks from 0 to {world.size() - 1}, got {chosen}")
    known = world if len(chosen) == world.size() else None
    return RankSet(chosen, *_base(world, f"group {_next_serial(world)}"), stream, known)


def rank_set_of(process_group: Any, stream: Any = None) -> RankSet:
    """Return the ranks of a `torch.distributed` group as a set; every member must do so equally often.

    On a rank that is not a member the set is empty: torch does not tell it the members.

    Raises:
        RuntimeError: `torch.distributed` is not initialised.
        TypeError: not a `ProcessGroup`.
    """
    world = _world()
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return RankSet((), *_base(world, "a group of others"), stream)
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"group: expected a torch.distributed.ProcessGroup, got {type(process_group).__name__}")
    ranks = dist.get_process_group_ranks(process_group)
    name = f"torch {process_group.group_name}/{_next_serial(process_group)}"
    return RankSet(ranks, *_base(process_group, name), stream, process_group)


def _on_gpus(device: torch.device) -> tuple[str, bool]:
    """Backend for CUDA tensors, and whether it takes them through host memory: gloo where the default group says so."""
    try:
        name = backend_kind(_world()._get_backend(device))
    except RuntimeError:  # the default group is for CPU tensors only
        name = "nccl"
    return ("gloo", True) if name == "gloo" else ("nccl", False)


def _next_serial(process_group: Any) -> int:
    return next(_serials.setdefault(process_group, itertools.count()))


def _world() -> Any:
    if not dist.is_initialized():
        raise RuntimeError("no process group: call init_process_group() first")
    return dist.group.WORLD


def _base(process_group: Any, name: str) -> tuple[Any, timedelta, str]:
    """Store, timeout and name of a set made of ranks of `process_group`."""
    store = dist.PrefixStore(f"bagua/communicator/{name}", dist.distributed_c10d._get_default_store())
    device = process_group._device_types[0]
    return store, process_group._get_backend(device).options._timeout, name

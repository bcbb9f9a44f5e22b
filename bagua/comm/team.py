"""The ranks that train one model together: how they meet, and how their lanes get groups of their own."""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagua.comm.groups import Group, Groups
from bagua.errors import CommunicationError

__all__ = ["Team", "node_key"]

_POLL_S = (0.0005, 0.05)  # first and longest sleep between two looks into the store


@dataclass(eq=False)
class Counters:
    """Numbers for store keys, alike on all ranks because what they count is collective.

    Attributes:
        posted: this rank's keys of meetings that are still in the store.
    """

    meetings: int = 0
    lanes: int = 0
    posted: list[str] = field(default_factory=list)


# By process group, not by its name: a later group of the same name has another store and starts at zero.
_counters: weakref.WeakKeyDictionary[Any, Counters] = weakref.WeakKeyDictionary()


def node_key() -> str:
    """Return a string that is equal on exactly the ranks of one node.

    The launcher's node number where there is one (several nodes may be emulated on one host), else the host name.
    """
    for name in ("GROUP_RANK", "NODE_RANK"):
        if name in os.environ:
            return f"{name}={os.environ[name]}"
    return f"host={socket.gethostname()}"


@dataclass(eq=False)
class Team:
    """All ranks of a process group, with a store to meet in and a factory of groups for lanes.

    Attributes:
        rank: my rank.
        size: number of ranks.
        store: a `torch.distributed` store that all members share, under a prefix of this team's own.
        timeout: how long to wait for a rank.
        backend: "gloo", "nccl", or "local" (ranks that take turns in one process).
        name: the parent group's name, for messages.
        node: what `node_key()` says on this rank.
        counters: shared by all teams of the same process group.
    """

    rank: int
    size: int
    store: Any
    timeout: timedelta
    backend: str = "gloo"
    name: str = "default"
    node: str = field(default_factory=node_key)
    counters: Counters = field(default_factory=Counters)

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
        name = str(backend.name()).lower()
        if name not in ("gloo", "nccl"):
            raise ValueError(f"process_group: backend {name!r} is not supported, only gloo and nccl are")
        if device.type == "cuda" and name != "nccl":
            raise ValueError(f"process_group: CUDA parameters need the nccl backend, the group has {name}")
        group_name = str(pg.group_name)
        store = dist.PrefixStore(f"bagua/{group_name}", dist.distributed_c10d._get_default_store())
        counters = _counters.setdefault(pg, Counters())
        return cls(pg.rank(), pg.size(), store, backend.options._timeout, name, group_name, counters=counters)

    def meet(self, what: str, payload: bytes) -> list[bytes]:
        """Exchange small messages through the store; returns everyone's, by rank. Collective over the team.

        Raises:
            CommunicationError: ranks did not come within `timeout`; names them.
        """
        if self.size == 1:
            return [payload]
        serial = self._next_meeting()
        keys = [f"meet/{serial}/{rank}" for rank in range(self.size)]
        self._store(what, lambda: self.store.set(keys[self.rank], payload))
        posted = self.counters.posted
        posted.append(keys[self.rank])
        if len(posted) > 2:  # all have come to the last meeting, hence have read everything of the one before
            old = posted.pop(0)
            self._store(what, lambda: self.store.delete_key(old))
        self._wait(keys, what)
        return [bytes(each) for each in self._store(what, lambda: self.store.multi_get(keys))]

    def tell(self, what: str, payload: bytes | None) -> bytes:
        """Give everyone rank 0's `payload`. Collective over the team; ranks other than 0 pass None.

        Raises:
            CommunicationError: rank 0 did not post it within `timeout`.
        """
        if self.size == 1:
            assert payload is not None
            return payload
        serial = self._next_meeting()
        key = f"tell/{serial}/0"
        if self.rank == 0:
            self._store(what, lambda: self.store.set(key, payload))
        self._wait([key], what)
        return bytes(self._store(what, lambda: self.store.get(key)))

    def missing(self, key: str, seconds: float) -> list[int]:
        """Post a sign of life under `key` and return the ranks that give none within `seconds`. Never raises."""
        waiting = set(range(self.size))
        try:
            self.store.set(f"{key}/{self.rank}", b"1")
            deadline = time.monotonic() + seconds
            while True:
                waiting = {rank for rank in waiting if not self.store.check([f"{key}/{rank}"])}
                if not waiting or time.monotonic() > deadline:
                    return sorted(waiting)
                time.sleep(_POLL_S[1])
        except (RuntimeError, OSError):  # the store lives in rank 0
            return sorted(waiting) if 0 not in waiting else [0] if self.rank else []

    def next_lane(self) -> str:
        """Return a name for a new lane, the same on all ranks if they ask equally often."""
        self.counters.lanes += 1
        return str(self.counters.lanes)

    def open(self, name: str, hierarchical: bool = False, nodes: Sequence[Sequence[int]] | None = None) -> Groups:
        """Make process groups for one lane. Collective over the team; `name` must be new and the same everywhere."""
        members = tuple(range(self.size))
        nodes = tuple(tuple(node) for node in nodes) if nodes else (members,)
        # With several ranks a node, direct exchange would send the same sums through one network interface.
        alone = len(nodes) == self.size
        groups = Groups(self._group(f"{name}/world", members, direct=alone), nodes)
        if hierarchical:
            mine = next(node for node in nodes if self.rank in node)
            leaders = tuple(node[0] for node in nodes)
            groups.intra = self._group(f"{name}/intra{mine[0]}", mine)
            groups.inter = self._group(f"{name}/inter", leaders, direct=True) if self.rank in leaders else None
        return groups

    def discover_nodes(self, keys: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Sort the ranks by node: `keys` holds `node_key()` of each rank. First rank of a node = its leader."""
        nodes: dict[str, list[int]] = {}
        for rank, key in enumerate(keys):
            nodes.setdefault(key, []).append(rank)
        return tuple(tuple(node) for node in nodes.values())

    def _group(self, name: str, ranks: tuple[int, ...], direct: bool = False) -> Group:
        rank, size = ranks.index(self.rank), len(ranks)
        if size == 1:
            return Group(None, rank, size, ranks, self.backend)
        store = dist.PrefixStore(f"group/{name}", self.store)
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            pg = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            try:
                pg = dist.ProcessGroupGloo(store, rank, size, self.timeout)
            except RuntimeError as error:
                raise CommunicationError(f"ranks {ranks}: connecting over gloo failed: {error}") from error
        return Group(pg, rank, size, ranks, self.backend, direct=direct and self.backend == "gloo" and size > 2)

    def _next_meeting(self) -> int:
        self.counters.meetings += 1
        return self.counters.meetings

    def _wait(self, keys: list[str], what: str) -> None:
        deadline = time.monotonic() + self.timeout.total_seconds()
        pause = _POLL_S[0]
        # Polling, not store.wait(): that holds the client's lock, and watchdogs and lanes need the store too.
        while not self._store(what, lambda: self.store.check(keys)):
            if time.monotonic() > deadline:
                absent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise CommunicationError(
                    f"{what}: rank {', '.join(map(str, absent))} did not come within "
                    f"{self.timeout.total_seconds():g} s (this is rank {self.rank} of {self.size})"
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])

    def _store(self, what: str, call: Any) -> Any:
        try:
            return call()
        except (RuntimeError, OSError) as error:
            raise CommunicationError(
                f"{what}: the store is out of reach, rank 0 (which serves it) is probably gone: {error}"
            ) from error


def encode(message: Any) -> bytes:
    """Bytes of a JSON-able message for `Team.meet`."""
    return json.dumps(message).encode()


def decode(payload: bytes) -> Any:
    """The message in `payload`. JSON, never pickle: bytes from the network do not get to name classes."""
    return json.loads(payload)

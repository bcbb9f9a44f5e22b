"""Stores commits in the nodes' memory, and fetches their parts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bagua.checkpoint.errors import CheckpointError
from bagua.checkpoint.restore import Found, wanted
from bagua.elastic.commit import Commit, Holding, digest, peers, unpack
from bagua.elastic.link import Link
from bagua.elastic.memory import VARIABLE, Slot, open_slots

__all__ = ["MemoryStore"]

Part = tuple[str, int]  # item, and the rank that owns it


class MemoryStore:
    """Stores and loads commits in the memory of this node; each rank has one.

    Args:
        link: to the other ranks.

    Attributes:
        present: whether there is any; without a launcher's memory, commits are exchanged and not kept.

    Raises:
        ValueError: the launcher's memory cannot be opened.
    """

    def __init__(self, link: Link) -> None:
        self._link, self._rank = link, link.team.rank
        self._node = next(node for node in link.nodes if self._rank in node)
        self._slots: list[tuple[Slot, ...]] = []
        self._mine: tuple[Slot, ...] = ()
        self._base: tuple[int, int, str] | None = None  # what must not be overwritten: the last whole commit
        address = os.environ.get(VARIABLE)
        self.present = bool(address)
        if address:
            self._slots, local = open_slots(address), int(os.environ.get("LOCAL_RANK", "0"))
            if not 0 <= local < len(self._slots):
                raise ValueError(
                    f"LOCAL_RANK={local}: the launcher has reserved memory for {len(self._slots)} ranks only"
                )
            self._mine = self._slots[local]

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its node."""
        return self._node[0] == self._rank

    def contents(self) -> list[dict[str, Any]]:
        """What the slots of all ranks of this node hold."""
        return [about for pair in self._slots for slot in pair if (about := slot.about()) is not None]

    def store(self, commit: Commit, data: Mapping[str, bytes], reports: list[Any], what: str) -> None:
        """Keep parts of this node's ranks, each once, and copies of what one other node alone has. Collective.

        Args:
            commit: what it is.
            data: this rank's items.
            reports: of all ranks, with `digests` and `nbytes` of their items.
            what: for messages.

        Raises:
            CheckpointError: the memory of a rank is full, or a copy was damaged; names the rank.
            CommunicationError: the connection to a rank was lost.
        """
        problem = None
        try:
            parts = {(name, commit.owners[name][self._rank]): data[name] for name in self._kept(commit)}
            parts |= self._copies(commit, data, reports, what)
            facts = [
                ({"item": name, "rank": owner, "digest": reports[owner]["digests"][name]}, each)
                for (name, owner), each in parts.items()
            ]
            if self.present:
                slot = next(slot for slot in self._mine if self._base is None or _order(slot) != self._base)
                slot.write(commit.about(), facts)
        except (OSError, ValueError, CheckpointError) as error:
            problem = f"{type(error).__name__}: {error}"
        # Nobody may overwrite the commit before this one until all have this one.
        for rank, said in enumerate(self._link.gather(what, problem)):
            if said is not None:
                raise CheckpointError(f"{what}: rank {rank} of {self._link.team.size}: {said}")
        self._base = commit.order

    def fetch(self, found: Holding, objects: Mapping[str, Any]) -> Found:
        """What this rank needs for `objects`. Collective.

        Raises:
            CheckpointError: there is nothing for an object, or a part is damaged.
            CommunicationError: the connection to a rank was lost.
        """
        commit, size = found.commit, self._link.team.size
        what, same = f"commit {commit.number} in memory", commit.size == size
        own = self._index(commit)
        parts: dict[str, list[Any]] = {}
        for name in wanted(commit.kinds, objects, what):
            if commit.kinds[name] == "rng" and not same:
                continue
            owners = commit.owners[name]
            values: dict[int, Any] = {}
            for owner in sorted(set(owners)):
                users = [rank for rank in range(size) if not same or owners[rank] == owner]
                data = self._part(found, (name, owner), users, own, what)
                if self._rank in users:
                    values[owner] = unpack(data, f"{what}: {name}")
            parts[name] = [values[owner] for owner in ([owners[self._rank]] if same else owners)]
        self._base = commit.order
        return Found(what, commit.size, {name: commit.kinds[name] for name in parts}, parts)

    def close(self) -> None:
        """Let go of the memory; the launcher keeps it."""
        for slot in (slot for pair in self._slots for slot in pair):
            slot.close()
        self._slots, self._mine, self.present = [], (), False

    def _kept(self, commit: Commit) -> list[str]:
        """The items of which this rank has the part that its node keeps: it is the first one there to have it."""
        return [
            name
            for name, owners in commit.owners.items()
            if self._rank == min(rank for rank in self._node if owners[rank] == owners[self._rank])
        ]

    def _copies(self, commit: Commit, data: Mapping[str, bytes], reports: list[Any], what: str) -> dict[Part, bytes]:
        """Exchange copies with other nodes; returns what others gave."""
        to = peers(self._link.nodes)
        peer = to[self._rank]
        sources = [rank for rank, other in enumerate(to) if other == self._rank]
        gifts = [(name, rank) for rank in sources for name in self._lonely(commit, rank)]
        sends = [
            (peer, data[name]) for name in self._lonely(commit, self._rank) if (peer := to[self._rank]) is not None
        ]
        got = self._link.pass_on(what, sends, [(rank, reports[rank]["nbytes"][name]) for name, rank in gifts])
        for (name, rank), part in zip(gifts, got, strict=True):
            if digest(part) != reports[rank]["digests"][name]:
                raise CheckpointError(f"{name} of rank {rank} was damaged in transfer")
        return dict(zip(gifts, got, strict=True))

    def _lonely(self, commit: Commit, rank: int) -> list[str]:
        """The items whose part is `rank`'s own and that no rank on another node has."""
        node = next(node for node in self._link.nodes if rank in node)
        return [
            name
            for name, owners in sorted(commit.owners.items())
            if owners[rank] == rank and all(each in node for each, owner in enumerate(owners) if owner == rank)
        ]

    def _index(self, commit: Commit) -> dict[Part, tuple[Slot, int]]:
        """Where this node's memory has the parts of `commit`."""
        return {
            (part["item"], part["rank"]): (slot, index)
            for slot in (slot for pair in self._slots for slot in pair)
            if (about := slot.about()) is not None and Commit.of(about).order == commit.order
            for index, part in enumerate(about["parts"])
        }

    def _part(
        self, found: Holding, part: Part, users: list[int], own: Mapping[Part, tuple[Slot, int]], what: str
    ) -> bytes:
        """One part: from each node's own memory if all ranks that need it have it there, else from one rank to all."""
        places, nodes = found.places[part], self._link.nodes
        first = min(places)
        nbytes, expected = places[first]
        if all(any(rank in nodes[at] for at in places) for rank in users):
            if self._rank not in users:
                return b""
            data = own[part][0].part(own[part][1])
        else:
            source = nodes[first][0]
            mine = own[part][0].part(own[part][1]) if source == self._rank else None
            data = self._link.broadcast(what, mine, nbytes, source)
        if digest(data) != expected:
            raise CheckpointError(f"{what}: {part[0]} of rank {part[1]} is damaged")
        return data


def _order(slot: Slot) -> tuple[int, int, str] | None:
    about = slot.about()
    return None if about is None else Commit.of(about).order

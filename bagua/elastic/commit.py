"""Commits: their parts, where the parts are stored, and which commit is the newest complete one.

A part is one item (of `bagua.checkpoint`: weights, optimizer, algorithm, ...) of one rank, as `torch.save` wrote it. An
item that is the same on several ranks is one part, that of the lowest of these ranks: its owner.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bagua.checkpoint.errors import CheckpointError
from bagua.checkpoint.items import Item

__all__ = ["Commit", "Holding", "digest", "newest", "owners_of", "pack", "peers", "unpack"]

_FACTS = ("number", "generation", "token", "size", "kinds", "owners")


@dataclass(frozen=True)
class Commit:
    """One commit of all ranks.

    Attributes:
        number: commits of this training so far, over all restarts.
        generation: how often ranks had been started before it was made; of two commits with one number, the later.
        token: equal on the ranks that made it together, and on no others.
        size: number of ranks.
        kinds: of the items.
        owners: for each item, by rank, whose part stands for the rank.
    """

    number: int
    generation: int
    token: str
    size: int
    kinds: dict[str, str] = field(default_factory=dict)
    owners: dict[str, list[int]] = field(default_factory=dict)

    def about(self) -> dict[str, Any]:
        """As plain data."""
        return {name: getattr(self, name) for name in _FACTS}

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> Commit:
        """The inverse of `about`.

        Raises:
            CheckpointError: that is none.
        """
        try:
            commit = cls(*(about[name] for name in _FACTS))
            numbers = [commit.number, commit.generation, commit.size]
            ranks = [owner for owners in commit.owners.values() for owner in owners]
            assert all(isinstance(each, int) and each >= 0 for each in [*numbers, *ranks])
            assert all(len(owners) == commit.size for owners in commit.owners.values())
            assert commit.kinds.keys() == commit.owners.keys()
            assert all(owner < commit.size for owner in ranks)
        except (KeyError, TypeError, AttributeError, AssertionError) as error:
            raise CheckpointError("the description of a commit in memory is malformed") from error
        return commit

    @property
    def order(self) -> tuple[int, int, str]:
        """Sorts commits by age."""
        return self.number, self.generation, self.token

    def parts(self) -> set[tuple[str, int]]:
        """All (item, owner) that it takes."""
        return {(item, owner) for item, owners in self.owners.items() for owner in owners}


@dataclass
class Holding:
    """A commit, and the nodes that hold its parts.

    Attributes:
        places: for each (item, owner) the nodes that hold it, with its size in bytes and its digest.
    """

    commit: Commit
    places: dict[tuple[str, int], dict[int, tuple[int, str]]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether every part is held by some node."""
        return self.commit.parts() <= self.places.keys()


def newest(reports: Iterable[tuple[int, Sequence[Mapping[str, Any]]]]) -> Holding | None:
    """The newest commit of which every part exists.

    Args:
        reports: by node, what its slots say (`Slot.about`).
    """
    found: dict[tuple[int, int, str], Holding] = {}
    for node, slots in reports:
        for about in slots:
            commit = Commit.of(about)
            holding = found.setdefault(commit.order, Holding(commit))
            for part in about["parts"]:
                places = holding.places.setdefault((str(part["item"]), int(part["rank"])), {})
                places[node] = (int(part["nbytes"]), str(part["digest"]))
    whole = [holding for holding in found.values() if holding.whole]
    return max(whole, key=lambda holding: holding.commit.order, default=None)


def owners_of(digests: Sequence[Mapping[str, str]]) -> dict[str, list[int]]:
    """For each item, by rank, the lowest rank that holds the same bits.

    Raises:
        CheckpointError: ranks hold other items than rank 0.
    """
    for rank, report in enumerate(digests):
        if report.keys() != digests[0].keys():
            different = ", ".join(sorted(report.keys() ^ digests[0].keys()))
            raise CheckpointError(f"commit: rank {rank} and rank 0 differ in whether they hold {different}")
    owners: dict[str, list[int]] = {}
    for item in digests[0]:
        first: dict[str, int] = {}
        owners[item] = [first.setdefault(report[item], rank) for rank, report in enumerate(digests)]
    return owners


def peers(nodes: Sequence[Sequence[int]]) -> list[int | None]:
    """By rank, the rank on another node that keeps a copy of its parts; None if there is one node only.

    Every rank of a node takes the rank in the same place on the next node (counted around if that has fewer).
    """
    found: dict[int, int | None] = {}
    for at, node in enumerate(nodes):
        other = nodes[(at + 1) % len(nodes)]
        for place, rank in enumerate(node):
            found[rank] = None if len(nodes) == 1 else other[place % len(other)]
    return [found[rank] for rank in sorted(found)]


def pack(item: Item) -> bytes:
    """An item's value as a file of `torch.save` would have it."""
    stream = io.BytesIO()
    torch.save(item.value, stream)
    return stream.getvalue()


def unpack(data: bytes, name: str) -> Any:
    """The inverse of `pack`. Nothing is unpickled but tensors and plain data.

    Raises:
        CheckpointError: there is something else in it.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{name}: holds something that is neither a tensor nor plain data ({reason})") from error


def digest(data: bytes) -> str:
    """Digest for comparing bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()

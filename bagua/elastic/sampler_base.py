"""Base of the elastic samplers: rank and world size, and progress through the loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from bagua.engine.hooks import attachments
from bagua.engine.recovery.options import is_fault_tolerant
from bagua.sampling import Resumable

__all__ = ["ElasticSampler", "Follower", "Ranks"]

_T = TypeVar("_T")
_Place = TypeVar("_Place")


class Follower(Protocol):
    """Follows the members of a fault-tolerant training for a sampler."""

    @property
    def rank(self) -> int:
        """Of this process."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def tracking(self) -> bool:
        """Whether `track` is in progress."""
        ...

    def track(self, loader: Iterable[_T], items_per_batch: int) -> Iterator[_T]:
        """The batches of `loader`; the rest of the epoch is divided anew when the members change."""
        ...


class Ranks:
    """Rank and number of ranks: fixed, or those of a fault-tolerant training.

    Args:
        num_replicas, rank: None takes them from `torch.distributed`, or from the training that is followed later.

    Attributes:
        given: whether both were given.
        follower: of the training, set by `State`.

    Raises:
        RuntimeError: they are needed, and there is neither a process group nor a fault-tolerant training.
        ValueError: out of range.
    """

    def __init__(self, num_replicas: int | None, rank: int | None) -> None:
        self.follower: Follower | None = None
        self.given = num_replicas is not None and rank is not None
        self._fixed: tuple[int, int] | None = None
        group: Any = torch.distributed
        if self.given or (group.is_available() and group.is_initialized()):
            size = group.get_world_size() if num_replicas is None else num_replicas
            mine = group.get_rank() if rank is None else rank
            if size < 1:
                raise ValueError(f"num_replicas: expected 1 or more, got {size}")
            if not 0 <= mine < size:
                raise ValueError(f"rank: expected 0 to {size - 1}, got {mine}")
            self._fixed = mine, size
        elif not _can_follow():
            raise RuntimeError("num_replicas and rank: give both, or call bagua.init_process_group() first")

    @property
    def now(self) -> tuple[int, int]:
        """Rank and number of ranks.

        Raises:
            RuntimeError: there is nothing to follow yet.
        """
        if self.follower is not None:
            return self.follower.rank, self.follower.size
        if self._fixed is None:
            raise RuntimeError("sampler: with fault_tolerant, pass it to bagua.elastic.State before you use it")
        return self._fixed

    def check_tracked(self) -> None:
        """Raise if a sampler is iterated that could not be told of a change of the members.

        Raises:
            RuntimeError: names what to use.
        """
        if self.follower is not None and not self.follower.tracking:
            raise RuntimeError("sampler: with fault_tolerant, iterate with sampler.track(loader)")


class ElasticSampler(Resumable[Any, _Place]):
    """A sampler of one rank, which may follow the members of a fault-tolerant training.

    Args:
        origin: position of the start of an epoch.
        num_replicas, rank: see `Ranks`.
    """

    def __init__(self, origin: _Place, num_replicas: int | None, rank: int | None) -> None:
        self._ranks = Ranks(num_replicas, rank)
        super().__init__(origin)

    @property
    def num_replicas(self) -> int:
        """Number of ranks."""
        return self._ranks.now[1]

    @property
    def rank(self) -> int:
        """Of this process."""
        return self._ranks.now[0]

    def follow(self, follower: Follower) -> None:
        """Take rank and number of ranks from a fault-tolerant training. Called by `State`.

        Raises:
            ValueError: they were given.
        """
        if self._ranks.given:
            raise ValueError("sampler: leave out num_replicas and rank: they change with a fault-tolerant module")
        self._ranks.follower = follower

    def __iter__(self) -> Iterator[Any]:
        self._ranks.check_tracked()
        return super().__iter__()

    def _track(self, loader: Iterable[_T], items_per_batch: int) -> Iterator[_T]:
        if self._ranks.follower is None:
            yield from super()._track(loader, items_per_batch)
        else:
            self._tracked = True
            yield from self._ranks.follower.track(loader, items_per_batch)


def _can_follow() -> bool:
    """Whether this process is in a fault-tolerant training, or is going to be."""
    return is_fault_tolerant() or any(each.before_step is not None for each in attachments.all())

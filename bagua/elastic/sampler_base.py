"""Base of the elastic samplers: rank and world size, and progress through the loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import Sampler as _TorchSampler

from bagua.engine.hooks import attachments
from bagua.engine.recovery.options import is_fault_tolerant

__all__ = ["ElasticSampler", "Follower", "Ranks", "Tracked", "track"]

_T = TypeVar("_T")


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


class ElasticSampler(_TorchSampler[Any]):
    """A sampler of one rank, which may follow the members of a fault-tolerant training.

    Attributes:
        untracked: whether it is in the middle of an iteration outside `track`, which may be ahead of the training.
    """

    untracked = False

    def __init__(self, num_replicas: int | None, rank: int | None) -> None:
        self._ranks = Ranks(num_replicas, rank)

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


class Tracked(Protocol):
    """A sampler that can be told how far the training is."""

    epoch: int

    @property
    def over(self) -> bool:
        """Whether an iteration has come to the end of the epoch."""
        ...

    def go_on(self) -> None:
        """Begin the next iteration where the training is."""
        ...

    def repeat_if_over(self) -> None:
        """Begin the next iteration at the start of the epoch if one has come to its end."""
        ...

    def used(self, num: int) -> None:
        """Each rank has used `num` items since the iteration began."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there."""
        ...

    def __len__(self) -> int:
        """Items of this rank in an iteration, to the end of the epoch."""
        ...


def track(sampler: Tracked, ranks: Ranks, loader: Iterable[_T]) -> Iterator[_T]:
    """Yield the loader's batches; before each, tell the sampler what is used once the batch is.

    Raises:
        TypeError: the loader does not draw from the sampler.
    """
    by_batch = getattr(loader, "batch_sampler", None) is sampler
    if not by_batch and getattr(loader, "sampler", None) is not sampler:
        raise TypeError(f"loader: a {type(loader).__name__} that does not draw from this sampler")
    batch_size = 1 if by_batch else getattr(loader, "batch_size", None) or 1  # without batches: one sample at a time
    if ranks.follower is not None:
        yield from ranks.follower.track(loader, batch_size)
        return
    sampler.repeat_if_over()
    total = len(sampler)
    for index, batch in enumerate(loader, 1):
        sampler.used(min(index * batch_size, total))
        yield batch


def _can_follow() -> bool:
    """Whether this process is in a fault-tolerant training, or is going to be."""
    return is_fault_tolerant() or any(each.before_step is not None for each in attachments.all())

"""Base of the elastic samplers: rank and world size, and progress through the loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch

__all__ = ["Tracked", "rank_and_size", "track"]

_T = TypeVar("_T")


class Tracked(Protocol):
    """A sampler that can be told how far the training is."""

    def used(self, num: int) -> None:
        """Each rank has used `num` items since the iteration began."""
        ...


def rank_and_size(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Number of ranks and rank; None takes them from `torch.distributed`.

    Raises:
        RuntimeError: it is needed and not initialised.
        ValueError: out of range.
    """
    group: Any = torch.distributed
    if (num_replicas is None or rank is None) and not (group.is_available() and group.is_initialized()):
        raise RuntimeError("num_replicas and rank: give both, or call bagua.init_process_group() first")
    size = group.get_world_size() if num_replicas is None else num_replicas
    mine = group.get_rank() if rank is None else rank
    if size < 1:
        raise ValueError(f"num_replicas: expected 1 or more, got {size}")
    if not 0 <= mine < size:
        raise ValueError(f"rank: expected 0 to {size - 1}, got {mine}")
    return size, mine


def track(sampler: Tracked, loader: Iterable[_T]) -> Iterator[_T]:
    """Yield the loader's batches; before each, tell the sampler what is used once the batch is.

    Raises:
        TypeError: the loader does not draw from the sampler.
    """
    by_batch = getattr(loader, "batch_sampler", None) is sampler
    if not by_batch and getattr(loader, "sampler", None) is not sampler:
        raise TypeError(f"loader: a {type(loader).__name__} that does not draw from this sampler")
    batch_size = 1 if by_batch else getattr(loader, "batch_size", None) or 1  # without batches: one sample at a time
    total = len(sampler)  # pyright: ignore[reportArgumentType]
    for index, batch in enumerate(loader, 1):
        sampler.used(min(index * batch_size, total))
        yield batch

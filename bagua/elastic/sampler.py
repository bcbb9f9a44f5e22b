"""Elastic sampler: its position counts the samples of all ranks, so another number of ranks can continue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar, cast

import torch

from bagua.elastic.sampler_base import ElasticSampler
from bagua.sampling import checked_count

__all__ = ["Sampler"]

_T = TypeVar("_T")


class Sampler(ElasticSampler[int]):
    """Each rank's samples of an epoch, in the order of `torch.utils.data.DistributedSampler`.

    With R ranks that begin at position p, rank r takes samples p + r, p + r + R, ... of the epoch's order. Ranks take
    equally many, so after n each the position of all is p + n R. Another number of ranks begins there: no sample comes
    twice and none is left out, but for the end of an epoch, where up to R - 1 samples come twice, or not at all with
    `drop_last`, so that all ranks have the same number.

    With `global_batch_size` it is a batch sampler: each item is this rank's share of the next so many samples. Shares
    differ by at most one sample.

    An iteration begins at the start of the epoch, or at the position that was loaded, whatever an earlier one that was
    not finished has been given. The length does not change while it runs.

    With a fault-tolerant module (docs/fault_tolerance.md) pass it to `bagua.elastic.State` and iterate with `track`. It
    then follows the members, also within an epoch, and a step that is lost is repeated with the same samples.

    Args:
        source: a dataset, or a `DistributedSampler`, of which dataset, shuffle, seed and drop_last are taken.
        shuffle, seed, drop_last: as for `DistributedSampler`; not with one.
        num_replicas, rank: None takes them from `torch.distributed`, or from the fault-tolerant module.
        global_batch_size: samples of all ranks in a step, whatever the number of ranks. With more ranks than samples
            each takes one. Use it as `DataLoader(batch_sampler=...)`. None: a sampler of single samples.

    Attributes:
        epoch: with the seed it decides the order.

    Raises:
        ValueError, TypeError, RuntimeError: an argument is wrong; names it.

    Examples:
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(8.0))
        >>> sampler = bagua.elastic.Sampler(dataset)
        >>> loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
        >>> for batch in sampler.track(loader):
        ...     print(sampler.position)
        4
        8
        >>> shares = [bagua.elastic.Sampler(dataset, global_batch_size=5, num_replicas=2, rank=r) for r in (0, 1)]
        >>> [[len(batch) for batch in share] for share in shares]
        [[3, 2], [2, 1]]
    """

    def __init__(
        self,
        source: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        global_batch_size: int | None = None,
    ) -> None:
        super().__init__(0, num_replicas, rank)
        if isinstance(source, torch.utils.data.DistributedSampler):
            shuffle, seed, drop_last, data = source.shuffle, source.seed, source.drop_last, source.dataset
        elif isinstance(source, Sized):
            data = source
        else:
            raise TypeError(f"source: {type(source).__name__} has no length and is not a DistributedSampler")
        if global_batch_size is not None and (
            isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1
        ):
            raise ValueError(f"global_batch_size: expected an integer >= 1 or None, got {global_batch_size!r}")
        self._order = torch.utils.data.DistributedSampler(
            cast(Any, data), num_replicas=1, rank=0, shuffle=shuffle, seed=seed, drop_last=False
        )
        self.drop_last, self.global_batch_size = drop_last, global_batch_size

    @property
    def num_samples(self) -> int:
        """In the data."""
        return self._order.total_size

    @property
    def position(self) -> int:
        """Samples of this epoch that all ranks together have been given, or used (see `track`)."""
        return self._at

    def _left(self, start: int) -> int:
        """Samples of a rank, or batches with `global_batch_size`."""
        left, block = max(self.num_samples - start, 0), self._samples_per_item(self.num_replicas)
        return left // block if self.drop_last else -(-left // block)

    def _give(self, start: int) -> Iterator[Any]:
        self._order.set_epoch(self.epoch)
        order, (rank, size) = list(self._order), self._ranks.now
        block = self._samples_per_item(size)
        for step in range(self._left(start)):
            at = start + step * block
            if self.global_batch_size is None:
                yield order[(at + rank) % len(order)]
            else:
                mine = range(at + rank, min(at + block, len(order)), size)
                yield [order[each % len(order)] for each in mine or (at + rank,)]

    def _after(self, start: int, num: int, whole: bool) -> int:
        return self.num_samples if whole else start + num * self._samples_per_item(self.num_replicas)

    def _samples_per_item(self, size: int) -> int:
        """Of all ranks together."""
        return size if self.global_batch_size is None else max(size, self.global_batch_size)

    def track(self, loader: Iterable[_T]) -> Iterator[_T]:
        """The batches of a `DataLoader` that has this sampler, with the position set to what they have used up.

        A loader with workers asks the sampler for more than the training has seen; without this, a commit would
        count that as used.

        Raises:
            TypeError: the loader has no batch size, or another sampler; or it takes batches for samples.
        """
        by_batch = getattr(loader, "batch_sampler", None) is self
        if by_batch != (self.global_batch_size is not None) and (by_batch or getattr(loader, "sampler", None) is self):
            right = "sampler" if by_batch else "batch_sampler"
            raise TypeError(f"loader: pass this sampler as {right}; with global_batch_size it yields batches")
        return super().track(loader)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, equal on all ranks; and what the order depends on.

        Logs a warning where it may count what workers of a loader have fetched (see `track`).
        """
        self._warn_if_ahead()
        return {"epoch": self.epoch, "position": self.position, **self._circumstances()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the next iteration where `state` was taken, by any number of ranks.

        Raises:
            ValueError: it was taken with other data or another order; names what differs. Or it is damaged.
        """
        for name, value in self._circumstances().items():
            if state.get(name) != value:
                raise ValueError(f"sampler: {name} was {state.get(name)!r} and is {value!r}")
        epoch, position = (
            checked_count(f"sampler: {name} of the state", state.get(name)) for name in ("epoch", "position")
        )
        self.epoch = epoch
        self._go_to(position)

    def _circumstances(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "shuffle": self._order.shuffle, "seed": self._order.seed}

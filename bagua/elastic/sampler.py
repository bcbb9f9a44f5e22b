"""Elastic sampler: its position counts the samples of all ranks, so another number of ranks can continue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import Sampler as _TorchSampler

from bagua.elastic.sampler_base import rank_and_size, track

__all__ = ["Sampler"]

_T = TypeVar("_T")


class Sampler(_TorchSampler[int]):
    """Each rank's samples of an epoch, in the order of `torch.utils.data.DistributedSampler`.

    With R ranks that begin at position p, rank r takes samples p + r, p + r + R, ... of the epoch's order. Ranks take
    equally many, so after n each the position of all is p + n R. Another number of ranks begins there: no sample comes
    twice and none is left out, but for the end of an epoch, where up to R - 1 samples come twice, or not at all with
    `drop_last`, so that all ranks have the same number.

    Args:
        source: a dataset, or a `DistributedSampler`, of which dataset, shuffle, seed and drop_last are taken.
        shuffle, seed, drop_last: as for `DistributedSampler`; not with one.
        num_replicas, rank: None takes them from `torch.distributed`.

    Attributes:
        epoch: with the seed it decides the order.
        position: samples of this epoch that all ranks together have been given, or used (see `track`).

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
    ) -> None:
        self.num_replicas, self.rank = rank_and_size(num_replicas, rank)
        if isinstance(source, torch.utils.data.DistributedSampler):
            shuffle, seed, drop_last, data = source.shuffle, source.seed, source.drop_last, source.dataset
        elif isinstance(source, Sized):
            data = source
        else:
            raise TypeError(f"source: {type(source).__name__} has no length and is not a DistributedSampler")
        self._order = torch.utils.data.DistributedSampler(
            cast(Any, data), num_replicas=1, rank=0, shuffle=shuffle, seed=seed, drop_last=False
        )
        self.drop_last = drop_last
        self.epoch = self.position = self._begin = self._count = 0

    @property
    def num_samples(self) -> int:
        """In the data."""
        return self._order.total_size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. The position is kept if the epoch is the one that was loaded.

        Raises:
            ValueError: not an integer >= 0.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch: expected an integer >= 0, got {epoch!r}")
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def __len__(self) -> int:
        """Samples of a rank from the position to the end of the epoch."""
        left = max(self.num_samples - self.position, 0)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        self._order.set_epoch(self.epoch)
        order, size = list(self._order), self.num_replicas
        self._begin, self._count = begin, count = self.position, len(self)
        for step in range(count):
            self.used(step + 1)
            yield order[(begin + step * size + self.rank) % len(order)]

    def track(self, loader: Iterable[_T]) -> Iterator[_T]:
        """The batches of a `DataLoader` that has this sampler, with the position set to what they have used up.

        A loader with workers asks the sampler for more than the training has seen; without this, a commit would
        count that as used.

        Raises:
            TypeError: the loader has no batch size, or another sampler.
        """
        return track(self, loader)

    def used(self, num: int) -> None:
        """Set the position to where each rank has used `num` samples since the iteration began."""
        whole = num >= self._count
        self.position = self.num_samples if whole else self._begin + num * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, equal on all ranks; and what the order depends on."""
        return {"epoch": self.epoch, "position": self.position, **self._circumstances()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the next iteration where `state` was taken, by any number of ranks.

        Raises:
            ValueError: it was taken with other data or another order; names what differs.
        """
        for name, value in self._circumstances().items():
            if state.get(name) != value:
                raise ValueError(f"sampler: {name} was {state.get(name)!r} and is {value!r}")
        self.epoch, self.position = state["epoch"], state["position"]

    def _circumstances(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "shuffle": self._order.shuffle, "seed": self._order.seed}

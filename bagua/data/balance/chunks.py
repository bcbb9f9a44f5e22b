"""Load-balancing sampler: in each step, all ranks get samples of similar complexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.data.balance.complexities import as_complexities, complexities, fingerprint
from bagua.data.balance.progress import Progress, check_flag, check_seed, check_share

__all__ = ["LoadBalancingDistributedSampler"]


class LoadBalancingDistributedSampler(Progress[int]):
    """Sampler that gives all ranks samples of similar complexity in each step; replaces `DistributedSampler`.

    Samples are sorted by complexity and cut into chunks of R, one sample for each rank. The order of the chunks is
    random, and new in each epoch set with `set_epoch`. Every sample is used once, except that up to R - 1 are repeated
    (or, with `drop_last`, dropped) so that all ranks have the same number.

    Args:
        dataset: has a length and is indexed by integers.
        complexity_fn: a sample to a number, called for all samples at once; or the numbers, N of them, as a list,
            array or tensor (see `bagua.data.complexities` for keeping them in a file).
        num_replicas, rank: None takes them from `torch.distributed`.
        shuffle: False gives the chunks in ascending order.
        seed: equal on all ranks.
        drop_last: leave N mod R samples out: with `shuffle` other ones in each epoch, else the most complex.
        random_level: 0 to 1: before sorting, add noise of up to this part of the range of complexities. More
            variety, less balance. Acts with `shuffle` only.

    Raises:
        ValueError, TypeError, RuntimeError: an argument is wrong; names it.

    Differs: from Bagua 0.9, no sample comes twice while another is left out with `drop_last`.

    Examples:
        >>> texts = ["a", "to be", "or", "not to be"]
        >>> sampler = bagua.data.LoadBalancingDistributedSampler(texts, complexity_fn=len, shuffle=False)
        >>> list(sampler)
        [0, 2, 1, 3]
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        super().__init__()
        self.num_replicas, self.rank = check_share(num_replicas, rank)
        self.shuffle, self.drop_last = check_flag("shuffle", shuffle), check_flag("drop_last", drop_last)
        self.seed = check_seed(seed)
        if not 0 <= random_level <= 1:
            raise ValueError(f"random_level: expected 0 to 1, got {random_level}")
        self.random_level = float(random_level)
        self.dataset = dataset
        if callable(complexity_fn):
            function: Any = complexity_fn
            self.complexities = complexities(dataset, function)
        else:
            self.complexities = as_complexities(complexity_fn, "complexity_fn")
            if len(self.complexities) != len(dataset):
                raise ValueError(f"complexity_fn: returned {len(self.complexities)} numbers for {len(dataset)} samples")
        count = len(self.complexities) / self.num_replicas
        self.num_samples = math.floor(count) if self.drop_last else math.ceil(count)
        self.total_size = self.num_samples * self.num_replicas
        self._fingerprint = fingerprint(self.complexities)
        self._planned: tuple[int, Tensor] | None = None

    def all_indices(self) -> Tensor:
        """This epoch's samples of all ranks: [num_samples, num_replicas] int64."""
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = self.epoch, self._plan()
        return self._planned[1]

    def _items(self) -> Sequence[int]:
        return self.all_indices()[:, self.rank].tolist()

    def _circumstances(self) -> dict[str, Any]:
        return {
            "num_replicas": self.num_replicas,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "random_level": self.random_level,
            "complexities": self._fingerprint,
        }

    def _plan(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        values, spare = self.complexities, len(self.complexities) - self.total_size
        if self.shuffle and self.random_level > 0:
            reach = int((values.max() - values.min()).item() * self.random_level + 1)
            values = values + torch.randint(reach, values.shape, generator=generator, device="cpu")
        order = values.argsort(stable=True)
        if spare > 0 and self.shuffle:  # the longest ones must not be those that are never seen
            kept = torch.ones(len(order), dtype=torch.bool, device="cpu")
            kept[torch.randperm(len(order), generator=generator, device="cpu")[:spare]] = False
            order = order[kept]
        if self.total_size:
            order = order.repeat(-(-self.total_size // len(order)))[: self.total_size]
        chunks = order[: self.total_size].view(self.num_samples, self.num_replicas)
        return chunks[torch.randperm(self.num_samples, generator=generator, device="cpu")] if self.shuffle else chunks

"""Load-balancing batch sampler: a function makes batches of each rank's samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bagua.data.balance.chunks import LoadBalancingDistributedSampler
from bagua.data.balance.progress import Progress, check_flag

__all__ = ["LoadBalancingDistributedBatchSampler"]


class LoadBalancingDistributedBatchSampler(Progress[list[int]]):
    """Batch sampler that applies `batch_fn` to a rank's samples, with equally many batches on every rank.

    Each rank makes the batches of all ranks to know their number. A rank with fewer batches repeats its first
    ones, or, with `drop_last`, the others drop their last ones.

    Args:
        sampler: gives the samples of all ranks. Set the epoch here or there.
        batch_fn: a list of samples to lists of samples; must not depend on the rank.
        drop_last: use the smallest number of batches of any rank.

    Raises:
        TypeError: `sampler` is of another class, or `batch_fn` cannot be called or gives no lists.
        ValueError: `batch_fn` makes no batch for one rank and some for another.

    Examples:
        >>> texts = ["a", "to be", "or", "not to be"]
        >>> sampler = bagua.data.LoadBalancingDistributedSampler(texts, complexity_fn=len, shuffle=False)
        >>> def pairs(samples):
        ...     return [samples[i : i + 2] for i in range(0, len(samples), 2)]
        >>> list(bagua.data.LoadBalancingDistributedBatchSampler(sampler, pairs))
        [[0, 2], [1, 3]]
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], list[list[int]]],
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise TypeError(f"sampler: expected a LoadBalancingDistributedSampler, got {type(sampler).__name__}")
        if not callable(batch_fn):
            raise TypeError(f"batch_fn: expected a function, got {type(batch_fn).__name__}")
        self.sampler, self.batch_fn, self.drop_last = sampler, batch_fn, check_flag("drop_last", drop_last)
        self._planned: tuple[int, list[list[int]]] | None = None
        self._taken = 0  # calls of `sampler.set_epoch` that were taken over here

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, here and in the sampler.

        Raises:
            ValueError: not an integer >= 0.
        """
        self.sampler.set_epoch(epoch)
        self._take_epoch()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the next iteration where `state` was taken.

        Raises:
            ValueError: it was taken with other data, options or another number of ranks; names what differs.
        """
        super().load_state_dict(state)
        self.sampler.set_epoch(self.epoch)
        self._taken = self.sampler.epochs_set

    def _circumstances(self) -> dict[str, Any]:
        inner = self.sampler._circumstances()
        return {**inner, "drop_last": [self.sampler.drop_last, self.drop_last]}

    def _take_epoch(self) -> None:
        if self.sampler.epochs_set != self._taken or self.sampler.epoch != self.epoch:
            self._taken = self.sampler.epochs_set
            super().set_epoch(self.sampler.epoch)

    def _items(self) -> Sequence[list[int]]:
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = self.epoch, self._plan()
        return self._planned[1]

    def _plan(self) -> list[list[int]]:
        by_rank = [self._checked(self.batch_fn(column.tolist())) for column in self.sampler.all_indices().unbind(1)]
        counts = [len(batches) for batches in by_rank]
        mine = by_rank[self.sampler.rank]
        if self.drop_last:
            return mine[: min(counts)]
        if max(counts) and not min(counts):
            raise ValueError(
                f"batch_fn: returned no batch for rank {counts.index(0)} but {max(counts)} for another rank"
            )
        return [mine[at % len(mine)] for at in range(max(counts))]

    def _checked(self, batches: Any) -> list[list[int]]:
        if not isinstance(batches, list) or not all(isinstance(batch, list) for batch in batches):
            raise TypeError("batch_fn: must return a list of batches, each a list of samples")
        return batches

"""The load-balancing samplers, under the original's module name."""

from __future__ import annotations

from bagua.data import balance

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]


class LoadBalancingDistributedSampler(balance.LoadBalancingDistributedSampler):
    """`bagua.data.LoadBalancingDistributedSampler` with the original's `shuffle_chunks()`."""

    def shuffle_chunks(self) -> tuple[list[list[int]], list[int]]:
        """This epoch's chunks, each with a sample for every rank, and the order in which they are given out.

        Differs: the chunks are in that order already, so the order is 0, 1, 2, ...
        """
        chunks = self.all_indices().tolist()
        return chunks, list(range(len(chunks)))


class LoadBalancingDistributedBatchSampler(balance.LoadBalancingDistributedBatchSampler):
    """`bagua.data.LoadBalancingDistributedBatchSampler` with the original's `generate_batches()`."""

    def generate_batches(self) -> None:
        """Make this epoch's batches. Needs not be called: they are made when they are asked for."""
        self._items()

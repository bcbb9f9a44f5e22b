"""The load-balancing samplers, under the original's module name."""

from __future__ import annotations

from bagua.data.balance import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]

"""Data loading: cached samples, and batches of equal cost on all ranks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bagua.data.balance import (
        LoadBalancingDistributedBatchSampler,
        LoadBalancingDistributedSampler,
        TokenBudgetBatchSampler,
        complexities,
    )
    from bagua.data.cache import CachedDataset, CacheLoader

__all__ = [
    "CacheLoader",
    "CachedDataset",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "TokenBudgetBatchSampler",
    "complexities",
]

_HOME = {  # name -> module that has it, imported at its first use
    "CacheLoader": "bagua.data.cache",
    "CachedDataset": "bagua.data.cache",
    "LoadBalancingDistributedBatchSampler": "bagua.data.balance",
    "LoadBalancingDistributedSampler": "bagua.data.balance",
    "TokenBudgetBatchSampler": "bagua.data.balance",
    "complexities": "bagua.data.balance",
}


if not TYPE_CHECKING:  # with it, type checkers would take any name for one of this package

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(import_module(_HOME[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

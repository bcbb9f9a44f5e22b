"""The original's extras: fused optimizers, load-balanced samplers, cached datasets. Imported at their first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bagua.torch_api.contrib.cache_loader import CacheLoader
    from bagua.torch_api.contrib.cached_dataset import CachedDataset
    from bagua.torch_api.contrib.fuse.optimizer import fuse_optimizer
    from bagua.torch_api.contrib.load_balancing_data_loader import (
        LoadBalancingDistributedBatchSampler,
        LoadBalancingDistributedSampler,
    )

__all__ = [
    "CacheLoader",
    "CachedDataset",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "fuse_optimizer",
]

_HOME = {  # name -> module of this package
    "CacheLoader": "cache_loader",
    "CachedDataset": "cached_dataset",
    "LoadBalancingDistributedBatchSampler": "load_balancing_data_loader",
    "LoadBalancingDistributedSampler": "load_balancing_data_loader",
    "fuse_optimizer": "fuse.optimizer",
}


if not TYPE_CHECKING:  # with it, type checkers would take any name for one of this package

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

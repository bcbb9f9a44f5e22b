"""Sample cache: loaders and datasets over stores in memory, in a file or on servers."""

from __future__ import annotations

from bagua.data.cache.cache_loader import CacheLoader, CacheStats
from bagua.data.cache.cached_dataset import CachedDataset
from bagua.data.cache.store import Store, StoreError, StoreFullError, StoreStatus

__all__ = ["CacheLoader", "CacheStats", "CachedDataset", "Store", "StoreError", "StoreFullError", "StoreStatus"]

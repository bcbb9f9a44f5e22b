"""The original's `CachedDataset`."""

from __future__ import annotations

from typing import Any, ClassVar

from bagua.data.cache import CachedDataset as _CachedDataset
from bagua.data.cache import CacheLoader
from bagua.torch_api.contrib.cache_loader import StoredCacheLoader, without_foreign

__all__ = ["CachedDataset"]


class CachedDataset(_CachedDataset):
    """`dataset` with samples that are computed once, with the original's arguments and defaults.

    Args:
        dataset: anything with `__getitem__`.
        backend, dataset_name, writer_buffer_size, **kwargs: see `CacheLoader`.
    """

    loader_class: ClassVar[type[CacheLoader]] = StoredCacheLoader

    def __init__(
        self,
        dataset: Any,
        backend: str = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 20,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset, backend, dataset_name, writer_buffer_size=writer_buffer_size, **without_foreign(kwargs)
        )

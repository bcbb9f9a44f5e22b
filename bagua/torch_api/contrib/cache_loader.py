"""The original's `CacheLoader`."""

from __future__ import annotations

from typing import Any

from bagua.data.cache import CacheLoader as _CacheLoader
from bagua.torch_api.report import report_once

__all__ = ["CacheLoader", "StoredCacheLoader", "without_foreign"]


class StoreOfLoader:
    """What holds a loader's entries, by the original's names: `clear()`, `num_keys()`, `status()`, `shutdown()`."""

    def __init__(self, loader: _CacheLoader) -> None:
        self._loader = loader

    def clear(self) -> None:
        """Remove all entries, those of other loaders included."""
        self._loader.clear()

    def num_keys(self) -> int:
        """Return the number of entries."""
        return self._loader.num_keys()

    def status(self) -> bool:
        """Whether it answers."""
        return self._loader.status().available

    def shutdown(self) -> None:
        """Write what is pending and close it."""
        self._loader.close()


class StoredCacheLoader(_CacheLoader):
    """A loader with the attribute `store`."""

    @property
    def store(self) -> StoreOfLoader:
        """What holds the entries."""
        return StoreOfLoader(self)


class CacheLoader(StoredCacheLoader):
    """`get(key, load_fn)` and `num_keys()`, with the original's arguments and defaults.

    Differs: samples are stored without pickle (`serializer="pickle"` brings it back); pending entries are written by
    themselves; servers that are started listen on loopback, or one interface, and ask for a password.

    Args:
        backend: "redis", or what `bagua.data.CacheLoader` knows beside it.
        dataset_name: keys of loaders with other names are others.
        writer_buffer_size: entries written at once.
        **kwargs: for "redis" `hosts` (None: a server is started on each node), `cluster_mode` (spread over all
            servers, the default) and `capacity_per_node` in bytes, which is that of servers started here.
    """

    def __init__(
        self, backend: str = "redis", dataset_name: str = "", writer_buffer_size: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(backend, dataset_name, writer_buffer_size=writer_buffer_size, **without_foreign(kwargs))


def without_foreign(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave out a capacity for servers that are not ours, as the original did."""
    if kwargs.get("hosts") is not None and "capacity_per_node" in kwargs:
        report_once("capacity_per_node: does not apply to the servers in hosts; set maxmemory in their configuration")
        return {name: value for name, value in kwargs.items() if name != "capacity_per_node"}
    return kwargs

"""The caches that are compared, each as a function from a dataset to something that gives batches."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from bagua.data import CachedDataset
from benchmarks.cache.workload import Samples

__all__ = ["CONTENDERS", "Contender", "missing"]

BATCH_SIZE = 10


@dataclass(frozen=True)
class Contender:
    """A cache.

    Attributes:
        name: in the table.
        make: gets samples and an empty directory; returns batches for every epoch, and what ends an epoch.
        needs: modules without which it cannot run.
        note: what to know of it.
    """

    name: str
    make: Callable[[Samples, Path], tuple[Iterable[Any], Callable[[], None]]]
    needs: tuple[str, ...] = ()
    note: str = ""


def missing(contender: Contender) -> str:
    """What a contender lacks on this machine, "" if nothing."""
    for name in contender.needs:
        if name == "redis-server":
            if shutil.which("redis-server") is None and shutil.which("valkey-server") is None:
                return "redis-server is not installed"
            continue
        try:
            import_module(name)
        except ImportError:
            return f"{name} is not installed"
    return ""


class Mapped(Dataset[Any]):
    """A dataset made of a function."""

    def __init__(self, get: Callable[[int], Any], size: int) -> None:
        self.get, self.size = get, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.get(index)


def _batches(dataset: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=BATCH_SIZE, collate_fn=list)


def _nothing() -> None:
    pass


def _uncached(samples: Samples, directory: Path) -> tuple[Iterable[Any], Callable[[], None]]:
    return _batches(samples), _nothing


def _lru_cache(samples: Samples, directory: Path) -> tuple[Iterable[Any], Callable[[], None]]:
    return _batches(Mapped(functools.lru_cache(maxsize=None)(samples.__getitem__), len(samples))), _nothing


def _diskcache(samples: Samples, directory: Path) -> tuple[Iterable[Any], Callable[[], None]]:
    cache = import_module("diskcache").Cache(str(directory), size_limit=1 << 40)

    def get(index: int) -> Any:
        found = cache.get(index)
        if found is None:
            found = samples[index]
            cache.set(index, found)
        return found

    return _batches(Mapped(get, len(samples))), _nothing


def _litdata(samples: Samples, directory: Path) -> tuple[Iterable[Any], Callable[[], None]]:
    module = import_module("litdata.streaming.dataloader")
    loader = module.CacheDataLoader(
        samples, batch_size=BATCH_SIZE, cache_dir=str(directory), chunk_bytes=None, collate_fn=list
    )
    return loader, _nothing


def _bagua(
    backend: str, samples: Samples, directory: Path, where: str | None = None
) -> tuple[Iterable[Any], Callable[[], None]]:
    options: dict[str, Any] = {}
    if backend == "lmdb":
        options["path"] = directory if where is None else Path(where) / directory.name
    cached = CachedDataset(samples, backend, directory.name, **options)
    return _batches(cached), cached.flush


CONTENDERS = (
    Contender("uncached", _uncached),
    Contender("functools.lru_cache", _lru_cache, note="one process, never evicts, hands out the same tensor again"),
    Contender("diskcache", _diskcache, ("diskcache",), "SQLite and files, pickle"),
    Contender("litdata", _litdata, ("litdata",), "CacheDataLoader: writes chunks in the first epoch, in order"),
    Contender("bagua memory", functools.partial(_bagua, "memory"), note="one process"),
    Contender("bagua lmdb", functools.partial(_bagua, "lmdb"), ("lmdb",), "on disk"),
    Contender(
        "bagua lmdb, /dev/shm", functools.partial(_bagua, "lmdb", where="/dev/shm"), ("lmdb",), "in shared memory"
    ),
    Contender("bagua redis", functools.partial(_bagua, "redis"), ("redis", "redis-server"), "one server, loopback"),
)

"""Cache backends by name: picklable settings from which DataLoader workers open their store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from bagua.data.cache.capacity import check_capacity
from bagua.data.cache.cluster_store import ClusterStore
from bagua.data.cache.fallback_store import FallbackStore
from bagua.data.cache.interface import choose_address
from bagua.data.cache.job_servers import start_servers
from bagua.data.cache.lmdb_directory import check_directory, job_directory
from bagua.data.cache.lmdb_store import LmdbStore, import_lmdb
from bagua.data.cache.memory_store import MemoryStore
from bagua.data.cache.redis_host import RedisHost, parse_hosts
from bagua.data.cache.redis_store import RedisStore, import_redis
from bagua.data.cache.store import Store, StoreError

__all__ = ["BACKENDS", "Backend", "make_backend"]

BACKENDS = ("lmdb", "memory", "redis")


class Backend(Protocol):
    """Hashable and picklable; equal ones share a store within a process."""

    copies: ClassVar[bool]  # whether the store keeps copies of what it is given
    outlives: ClassVar[bool]  # whether entries are still there after the store was closed

    def __hash__(self) -> int: ...

    def open(self) -> Store:
        """Open the store for this process. Its reading and writing do not raise StoreError."""
        ...


@dataclass(frozen=True)
class MemoryBackend:
    """A dictionary in this process."""

    copies: ClassVar[bool] = False
    outlives: ClassVar[bool] = False
    capacity_bytes: int | None = None
    zero_copy: bool = False

    def open(self) -> Store:
        """Make it, empty."""
        return FallbackStore(MemoryStore(self.capacity_bytes, self.zero_copy), "memory")


@dataclass(frozen=True)
class LmdbBackend:
    """A file that all processes of the node share."""

    copies: ClassVar[bool] = True
    outlives: ClassVar[bool] = True
    path: str
    capacity_bytes: int | None = None

    def open(self) -> Store:
        """Open the file."""
        return FallbackStore(LmdbStore(self.path, self.capacity_bytes), self.path)


@dataclass(frozen=True)
class RedisBackend:
    """Servers that all processes of the job share."""

    copies: ClassVar[bool] = True
    outlives: ClassVar[bool] = True
    hosts: tuple[RedisHost, ...]

    def open(self) -> Store:
        """Make connections, at the first use of each."""
        stores: dict[str, Store] = {host.name: FallbackStore(RedisStore(host), host.name) for host in self.hosts}
        return ClusterStore(stores) if len(stores) > 1 else next(iter(stores.values()))


def make_backend(name: str, capacity_per_node: int | None, options: Mapping[str, Any]) -> Backend:
    """Return the backend `name`; starts servers or makes directories where that is part of it.

    Raises:
        ImportError: its package is not installed; names the extra.
        TypeError: an option that it does not have.
        ValueError: an unknown name, a wrong option.
        ConnectionError: a server in `hosts` cannot be reached.
    """
    check_capacity(capacity_per_node)
    makers = {"memory": _memory, "lmdb": _lmdb, "redis": _redis}
    if name not in makers:
        raise ValueError(f"backend: {name!r} is unknown; available: {', '.join(BACKENDS)}")
    maker = makers[name]
    known = [option for option in maker.__annotations__ if option not in ("capacity_per_node", "return")]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise TypeError(f"backend {name!r} has no option {', '.join(unknown)}; its options: {', '.join(known)}")
    return maker(capacity_per_node, **options)


def _memory(capacity_per_node: int | None, zero_copy: bool = False) -> Backend:
    return MemoryBackend(capacity_per_node, zero_copy)


def _lmdb(capacity_per_node: int | None, path: str | os.PathLike[str] | None = None) -> Backend:
    import_lmdb()
    directory = job_directory() if path is None else Path(path).resolve()
    check_directory(directory)
    return LmdbBackend(str(directory), capacity_per_node)


def _redis(
    capacity_per_node: int | None, hosts: Any = None, cluster_mode: bool = True, interface: str | None = None
) -> Backend:
    import_redis()
    if hosts is None:
        if interface is not None:
            choose_address(interface, 1)  # a wrong one is refused before ranks wait for each other
        started = start_servers(interface, capacity_per_node)
        return RedisBackend(tuple(started if cluster_mode else started[:1]))
    if capacity_per_node is not None:
        raise ValueError(
            "capacity_per_node: does not apply to the servers in hosts; set maxmemory in their configuration"
        )
    if interface is not None:
        raise ValueError("interface: applies to servers that Bagua starts; leave it out when hosts is given")
    parsed = parse_hosts(hosts)
    chosen = parsed if cluster_mode else (parsed[_node_rank() % len(parsed)],)
    for host in chosen:
        store = RedisStore(host)
        try:
            store.ping()
        except StoreError as error:
            raise ConnectionError(f"hosts: {error}") from error
        finally:
            store.close()
    return RedisBackend(chosen)


def _node_rank() -> int:
    """Number of this node, by the launcher's environment."""
    return int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", "0")))

"""The original's `RedisStore`, over the servers of `bagua.data.CacheLoader(backend="redis")`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bagua.data.cache.backends import make_backend
from bagua.gone import Gone
from bagua.torch_api.contrib.cache_loader import without_foreign
from bagua.torch_api.contrib.utils.store import Store, Value

__all__ = ["RedisStore", "start_redis_server_cli"]

start_redis_server_cli = Gone(
    "start_redis_server_cli",
    "RedisStore(hosts=None) starts servers, with a password and on loopback or one interface; or run redis-server",
)


class RedisStore(Store):
    """Values on Redis servers. Collective if servers are to be started.

    Args:
        hosts: [{"host": ..., "port": ...}]; None: a server is started on each node.
        cluster_mode: spread keys over all servers; otherwise each node uses one.
        capacity_per_node: bytes, of servers that are started here.

    Raises:
        ImportError: redis is not installed; names the extra.
        ConnectionError: a server in `hosts` cannot be reached.

    Differs: servers that are started ask for a password; they end with the processes that started them.
    """

    def __init__(
        self,
        hosts: Sequence[Mapping[str, Any]] | None = None,
        cluster_mode: bool = True,
        capacity_per_node: int | None = None,
    ) -> None:
        given: dict[str, Any] = {"hosts": hosts, "cluster_mode": cluster_mode, "capacity_per_node": capacity_per_node}
        options = without_foreign({name: value for name, value in given.items() if value is not None})
        self._inner = make_backend("redis", options.pop("capacity_per_node", None), options).open()

    def set(self, key: str, value: Value) -> None:
        """Keep `value`."""
        self._inner.set(key.encode(), _raw(value))

    def get(self, key: str) -> bytes | None:
        """Return the value of `key`."""
        return self.mget([key])[0]

    def mset(self, dictionary: Mapping[str, Value]) -> None:
        """Keep several, in one message to each server."""
        self._inner.mset([(key.encode(), _raw(value)) for key, value in dictionary.items()])

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the values of `keys`, by one question to each server."""
        found = self._inner.mget([key.encode() for key in keys])
        return [None if value is None else bytes(value) for value in found]

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._inner.num_keys()

    def clear(self) -> None:
        """Remove all."""
        self._inner.clear()

    def status(self) -> bool:
        """Whether the servers answer."""
        return self._inner.status().available

    def shutdown(self) -> None:
        """Close the connections; servers that were started end with their processes."""
        self._inner.close()


def _raw(value: Value) -> bytes:
    return value.encode() if isinstance(value, str) else value

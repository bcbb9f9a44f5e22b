"""The store on one Redis or Valkey server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from bagua.data.cache.redis_host import RedisHost
from bagua.data.cache.redis_reply import read_values
from bagua.data.cache.store import Buffer, StoreError, StoreFullError, StoreStatus

__all__ = ["RedisStore", "import_redis"]

_PREFIX = b"bagua:"
_CONNECT_TIMEOUT_S, _TIMEOUT_S = 2.0, 5.0
_AT_ONCE = 16  # values a command, which bounds the memory of both ends
_SCAN = 5000
_REFUSALS = ("MISCONF", "NOREPLICAS")


class RedisStore:
    """Entries on one server, under keys that begin with `bagua:`; others' keys are left alone.

    What is evicted is the server's to decide: `maxmemory-policy` of its configuration.

    Raises:
        ImportError: `redis` is not installed.
    """

    def __init__(self, host: RedisHost) -> None:
        self._redis = import_redis()
        # redis-py takes the code from the text of these
        self._refusals = self._redis.exceptions.ReadOnlyError, self._redis.exceptions.NoPermissionError
        self._host = host
        self._client = self._connect()

    def get(self, key: bytes) -> Buffer | None:
        """Return the value, the caller's own, or None."""
        return self.mget([key])[0]

    def mget(self, keys: Sequence[bytes]) -> list[Buffer | None]:
        """Return the values of `keys`, the caller's own."""
        found: list[Buffer | None] = []
        with self._errors():
            for begin in range(0, len(keys), _AT_ONCE):
                found += self._fetch([_PREFIX + key for key in keys[begin : begin + _AT_ONCE]])
        return found

    def set(self, key: bytes, value: Buffer) -> None:
        """Keep `value`."""
        self.mset([(key, value)])

    def mset(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """Keep several values; a server that refuses some may have taken others."""
        with self._errors():
            for begin in range(0, len(items), _AT_ONCE):
                with self._client.pipeline(transaction=False) as pipeline:
                    for key, value in items[begin : begin + _AT_ONCE]:
                        pipeline.set(_PREFIX + key, memoryview(value))
                    pipeline.execute()

    def num_keys(self) -> int:
        """Return the number of entries; looks at every key of the server."""
        with self._errors():
            return sum(1 for _ in self._client.scan_iter(match=_PREFIX + b"*", count=_SCAN))

    def clear(self) -> None:
        """Remove all entries of this kind, whoever wrote them."""
        with self._errors():
            keys: list[bytes] = []
            for key in self._client.scan_iter(match=_PREFIX + b"*", count=_SCAN):
                keys.append(key)
                if len(keys) == _SCAN:
                    self._client.unlink(*keys)
                    keys.clear()
            if keys:
                self._client.unlink(*keys)

    def status(self) -> StoreStatus:
        """Return what the server says; sizes are those of everything on it."""
        self.ping()
        try:
            with self._errors():
                memory, stats = self._client.info("memory"), self._client.info("stats")
                num_keys = self._client.dbsize()
        except StoreError:  # an access control list may not allow these
            return StoreStatus(True, eviction="unknown")
        limit = int(memory.get("maxmemory", 0)) or None
        policy = str(memory.get("maxmemory_policy", "unknown")) if limit else "none"
        evicted = int(stats.get("evicted_keys", 0))
        return StoreStatus(True, num_keys, int(memory["used_memory"]), limit, evicted, policy)

    def ping(self) -> None:
        """Return if the server answers."""
        with self._errors():
            self._client.ping()

    def close(self) -> None:
        """Close the connections."""
        with contextlib.suppress(StoreError), self._errors():
            self._client.close()

    def _fetch(self, keys: list[bytes]) -> Sequence[Buffer | None]:
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_command("MGET", *keys)
            return read_values(connection._sock, len(keys), self._redis.ResponseError)
        except self._redis.ResponseError:
            raise
        except BaseException:
            connection.disconnect()  # the rest of an answer must not become the next one's beginning
            raise
        finally:
            pool.release(connection)

    def _connect(self) -> Any:
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        host = self._host
        tls = {} if host.tls is None else {"ssl": True, **dict(host.tls)}
        return self._redis.Redis(
            host=host.host,
            port=host.port,
            db=host.db,
            username=host.username,
            password=host.password,
            protocol=2,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            socket_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),  # a connection that idled too long is closed by the server
            **tls,
        )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._redis.ResponseError as error:
            said = _answer(error)
            refused = said.startswith(_REFUSALS) or isinstance(error, self._refusals) or _is_oom(said)
            raise (StoreFullError if refused else StoreError)(f"{self._name}: {said}") from error
        except (self._redis.RedisError, OSError) as error:
            silent = isinstance(error, (self._redis.TimeoutError, TimeoutError)) and self._host.tls is not None
            hint = "; a server without TLS does not answer, either" if silent else ""
            raise StoreError(f"{self._name}: {error}{hint}") from error

    @property
    def _name(self) -> str:
        return f"redis at {self._host.name}{'' if self._host.tls is None else ' with TLS'}"


def _answer(error: Exception) -> str:
    """What the server said, without the command: redis-py puts that of a pipeline before it, with raw bytes of keys."""
    text = str(error)
    return text.rpartition(" of pipeline caused error: ")[2] if text.startswith("Command # ") else text


def _is_oom(said: str) -> bool:
    return "used memory > 'maxmemory'" in said


def import_redis() -> Any:
    """Return the module.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import redis
    except ImportError as error:
        raise ImportError("backend \"redis\" needs the package redis: pip install 'bagua[cache]'") from error
    return redis

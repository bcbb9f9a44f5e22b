"""`CacheLoader`: get a sample from the cache, or compute and store it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bagua.data.cache.backends import Backend, make_backend
from bagua.data.cache.client import Client, arrange_exit, connect, forget_claims, release
from bagua.data.cache.frame import SERIALIZERS, make_frame, make_key, read_frame
from bagua.data.cache.store import Buffer, StoreStatus

__all__ = ["CacheLoader", "CacheStats"]

Key = str | int | bytes


@dataclass
class CacheStats:
    """Hits and misses of a loader in this process.

    Attributes:
        num_hits: samples that came from the cache.
        num_misses: samples that were computed.
        num_damaged: those of the misses whose entry was there but not whole.
    """

    num_hits: int = 0
    num_misses: int = 0
    num_damaged: int = 0


class CacheLoader:
    """Cache of samples: `loader.get(key, load_fn)` returns `load_fn(key)`, computed once.

    Works in DataLoader workers of any kind and in several threads. The caller may modify returned samples.

    Args:
        backend: "lmdb" (a file all processes of a node share), "memory" (this process only) or "redis" (servers).
        dataset_name: namespace of the keys. Use another name when the way samples are computed
            changes and the store outlives the job.
        capacity_per_node: bytes after which entries are evicted; None: as the backend says.
        writer_buffer_size: entries written at once.
        serializer: "plain" (numbers, text, bytes, tensors, arrays, images, nested) or "pickle" (anything). Whoever can
            write to the store can run code in a process that reads pickles from it.
        **backend_options: lmdb: `path`. memory: `zero_copy`. redis: `hosts`, `cluster_mode`, `interface`.

    Raises:
        ImportError: the backend's package is not installed; names the extra.
        TypeError, ValueError: a wrong argument; names it.
        ConnectionError: a server in `hosts` cannot be reached.

    Examples:
        >>> loader = bagua.data.CacheLoader("memory")
        >>> loader.get("seven", lambda key: len(key))
        5
    """

    def __init__(
        self,
        backend: str = "lmdb",
        dataset_name: str = "",
        capacity_per_node: int | None = None,
        writer_buffer_size: int = 20,
        *,
        serializer: str = "plain",
        **backend_options: Any,
    ) -> None:
        if not isinstance(dataset_name, str):
            raise TypeError(f"dataset_name: expected str, got {type(dataset_name).__name__}")
        if isinstance(writer_buffer_size, bool) or not isinstance(writer_buffer_size, int) or writer_buffer_size < 1:
            raise ValueError(f"writer_buffer_size: expected a positive int, got {writer_buffer_size!r}")
        if serializer not in SERIALIZERS:
            raise ValueError(f"serializer: {serializer!r} is unknown; available: {', '.join(SERIALIZERS)}")
        self.dataset_name = dataset_name
        self._buffer_size = writer_buffer_size
        self._serializer = serializer
        self._backend = make_backend(backend, capacity_per_node, backend_options)
        self._client: Client | None = None
        self.stats = CacheStats()
        arrange_exit()

    @property
    def backend(self) -> Backend:
        """What opens the store; equal ones share it within a process."""
        return self._backend

    def get(self, key: Key, load_fn: Callable[[Any], Any]) -> Any:
        """Return the cached sample, or `load_fn(key)`.

        Raises:
            TypeError: the sample holds something that the serializer "plain" does not know; or a key of a wrong type.
            whatever `load_fn` raises.
        """
        return self.get_many([key], lambda keys: [load_fn(keys[0])])[0]

    def get_many(self, keys: Sequence[Key], load_fn: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
        """Return samples, asking the store once; `load_fn` gets the keys that are missing, if any.

        Raises:
            ValueError: `load_fn` returned another number of samples than it got keys; else as `get`.
        """
        client = self._connected()
        digests = [make_key(self.dataset_name, key) for key in keys]
        samples: list[Any] = [None] * len(keys)
        missing: list[int] = []
        for place, (digest, entry) in enumerate(zip(digests, client.find(digests), strict=True)):
            try:
                samples[place] = self._read(digest, entry)
            except LookupError:
                missing.append(place)
        self.stats.num_hits += len(keys) - len(missing)
        self.stats.num_misses += len(missing)
        if missing:
            computed = load_fn([keys[place] for place in missing])
            if len(computed) != len(missing):
                raise ValueError(f"load_fn: returned {len(computed)} samples for {len(missing)} keys")
            for place, sample in zip(missing, computed, strict=True):
                samples[place] = sample
                frame = make_frame(digests[place], sample, self._serializer, client.writer.allocate)
                client.writer.put(digests[place], frame)
        return samples

    def num_keys(self) -> int:
        """Return the number of entries in the store, those of other names and processes included.

        Raises:
            StoreError: the store cannot be reached.
        """
        client = self._connected()
        client.writer.flush()
        return client.store.num_keys()

    def status(self) -> StoreStatus:
        """Return what the store says of itself: sizes, evictions, whether it answers."""
        return self._connected().status()

    def flush(self) -> None:
        """Wait until what this process put is written."""
        self._connected().writer.flush()

    def clear(self) -> None:
        """Remove all entries from the store, those of other names included.

        Raises:
            StoreError: the store cannot be reached.
        """
        client = self._connected()
        client.writer.flush()
        client.store.clear()
        forget_claims(self._backend)

    def close(self) -> None:
        """Write what is pending and close the store, also for other loaders of this process that share it.

        Not needed at the end of a process. Another use opens it again.
        """
        release(self._backend)
        self._client = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "stats": CacheStats()}

    def _connected(self) -> Client:
        client = self._client
        if client is None or not client.usable:
            client = self._client = connect(self._backend, self._buffer_size)
        return client

    def _read(self, digest: bytes, entry: Buffer | None) -> Any:
        if entry is None:
            raise LookupError
        try:
            # A bytearray is ours alone; other buffers are the store's.
            return read_frame(digest, entry, self._serializer, copy=not isinstance(entry, bytearray))
        except ValueError:
            self.stats.num_damaged += 1
            raise LookupError from None

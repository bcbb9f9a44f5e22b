"""The embedded store: a memory-mapped file that all processes of a node read and write."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bagua.data.cache.capacity import disk_room_bytes
from bagua.data.cache.fork_safety import ForkLock
from bagua.data.cache.lmdb_directory import condemn, note_synced, prepare
from bagua.data.cache.lmdb_tables import Tables
from bagua.data.cache.store import Buffer, EntryTooLargeError, StoreError, StoreFullError, StoreStatus
from bagua.data.cache.usage import EVICTION

__all__ = ["LmdbStore"]

_MAX_MAP_BYTES, _MIN_MAP_BYTES = 1 << 40, 1 << 30
_SLACK_BYTES = 64 << 20
_MAX_READERS = 1024
_MAX_HITS_NOTED = 100_000
_FEW_BLOCKS = 256

_fork_lock = ForkLock()
_inherited: list[Any] = []  # environments of the parent process; not even collected
# One environment a path and process: LMDB's locks belong to the process, closing a second one would drop them.
_open_paths: weakref.WeakValueDictionary[Path, LmdbStore] = weakref.WeakValueDictionary()


class LmdbStore:
    """Store in an LMDB file: one writer at a time per node, any number of concurrent readers.

    A read makes one copy, from the map to memory of the sample's own: the map is read-only, and its pages are written
    anew by others once the read is over, so a tensor that lay in it could crash or change.

    Args:
        path: a local directory, empty or a cache's. In /dev/shm the cache is in memory.
        capacity_bytes: where eviction begins; None: nothing is evicted, writing ends when the disk is nearly full.

    Raises:
        ImportError: `lmdb` is not installed.
        ValueError: `path` holds other files.
    """

    def __init__(self, path: str | os.PathLike[str], capacity_bytes: int | None = None) -> None:
        self._lmdb = import_lmdb()
        self._path = Path(path).resolve()
        if self._path in _open_paths:
            raise ValueError(f"path: {self._path} is already open in this process with other options")
        self._capacity_bytes = capacity_bytes
        self._env: Any = None
        self._lock = threading.Lock()  # around opening
        self._wrote = False
        self._hits: dict[bytes, int] = {}
        self._tables: Tables | None = None
        prepare(self._path, self._read_last_txn)
        _fork_lock.add(self)
        _open_paths[self._path] = self

    def get(self, key: bytes) -> Buffer | None:
        """Return a copy of the value, the caller's own, or None."""
        return self.mget([key])[0]

    def mget(self, keys: Sequence[bytes]) -> list[Buffer | None]:
        """Return copies of the values, all as of one moment."""
        found: list[Buffer | None] = []
        with self._use() as (env, tables), env.begin(db=tables.entries, buffers=True) as txn:
            for key in keys:
                raw = txn.get(key)
                found.append(None if raw is None else bytearray(raw))
        if self._capacity_bytes is not None and len(self._hits) < _MAX_HITS_NOTED:
            for key, value in zip(keys, found, strict=True):
                if value is not None:
                    self._hits[key] = self._hits.get(key, 0) + 1
        return found

    def set(self, key: bytes, value: Buffer) -> None:
        """Keep a copy of `value`."""
        self.mset([(key, value)])

    def mset(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """Keep copies of several values, in one transaction: all or none, whatever happens to this process.

        If the disk is nearly full, as many of them as there is room for.
        """
        hits, self._hits = self._hits, {}
        with self._use() as (env, tables):
            fitting = self._fitting(items)
            self._wrote = True
            try:
                with env.begin(write=True) as txn:
                    too_large = tables.write(txn, fitting, hits)
            except self._lmdb.MapFullError:  # free pages are there, but too scattered
                self._shed(env, tables)
                with env.begin(write=True) as txn:
                    too_large = tables.write(txn, fitting, {})
        if len(fitting) < len(items):
            raise StoreFullError(f"the disk of {self._path} is nearly full")
        if too_large:
            raise EntryTooLargeError(f"{too_large} bytes are more than half of the capacity of {self._capacity_bytes}")

    def num_keys(self) -> int:
        """Return the number of entries."""
        with self._use() as (env, tables), env.begin() as txn:
            return txn.stat(tables.entries)["entries"]

    def clear(self) -> None:
        """Remove all entries; the file keeps its size."""
        with self._use() as (env, tables), env.begin(write=True) as txn:
            tables.clear(txn)

    def status(self) -> StoreStatus:
        """Return sizes and policy."""
        with self._use() as (env, tables), env.begin() as txn:
            clock, num_keys = tables.clock(txn), txn.stat(tables.entries)["entries"]
        policy = "none" if self._capacity_bytes is None else EVICTION
        return StoreStatus(True, num_keys, clock.used_bytes, self._capacity_bytes, clock.num_evicted, policy)

    def close(self) -> None:
        """Force what this process wrote to disk and let go of the file. A later call opens it again."""
        if self._wrote:
            with contextlib.suppress(StoreError), self._use() as (env, _):
                last = env.info()["last_txnid"]
                env.sync(True)
                note_synced(self._path, last)
                self._wrote = False
        with _fork_lock, self._lock:
            if self._env is not None:
                self._env.close()
                self._env = None
        _open_paths.pop(self._path, None)

    def suspend(self) -> None:
        """Close before a fork."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def abandon(self) -> None:
        """In a forked child: nothing is open but where the fork could not wait; that is kept forever, unused."""
        if self._env is not None:
            _inherited.append(self._env)
            self._env = None
        self._lock = threading.Lock()
        self._hits, self._wrote = {}, False
        _open_paths.pop(self._path, None)

    @contextlib.contextmanager
    def _use(self) -> Iterator[tuple[Any, Tables]]:
        """The open environment, safe from forks; errors of LMDB and of the disk become StoreError."""
        lmdb = self._lmdb
        try:
            with _fork_lock:
                with self._lock:
                    if self._env is None:
                        self._env = self._open()
                        self._tables = Tables(self._env, self._capacity_bytes)
                assert self._tables is not None
                yield self._env, self._tables
        except lmdb.MapFullError as error:
            raise StoreFullError(f"{self._path}: {error}") from error
        except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.InvalidError) as error:
            condemn(self._path)
            raise StoreError(f"{self._path} is damaged: {error}") from error
        except (lmdb.Error, OSError) as error:
            # LMDB says "Input/output error" of a write that was cut short.
            if os.strerror(errno.ENOSPC) in str(error) or (
                os.strerror(errno.EIO) in str(error) and os.statvfs(self._path).f_bavail < _FEW_BLOCKS
            ):
                raise StoreFullError(f"the disk of {self._path} is full") from error
            raise StoreError(f"{self._path}: {error}") from error

    def _open(self) -> Any:
        """Open the file, with the largest map that this process may have."""
        bounded = self._capacity_bytes
        size = _MAX_MAP_BYTES if bounded is None else bounded + max(bounded // 4, _SLACK_BYTES)
        while True:
            try:
                env = self._lmdb.open(
                    str(self._path),
                    map_size=-(-size // 4096) * 4096,
                    max_dbs=Tables.COUNT,
                    max_readers=_MAX_READERS,
                    sync=False,
                    metasync=False,
                    writemap=False,  # with it a full disk ends the process (SIGBUS)
                    meminit=False,
                    mode=0o600,
                )
                env.reader_check()  # gives back the slots of readers that were killed
                return env
            except (self._lmdb.MemoryError, MemoryError):
                if bounded is not None or size <= _MIN_MAP_BYTES:
                    raise StoreError(
                        f"{self._path}: cannot reserve {size} bytes of address space for the memory map"
                    ) from None
                size //= 2

    def _fitting(self, items: Sequence[tuple[bytes, Buffer]]) -> Sequence[tuple[bytes, Buffer]]:
        """The first of `items`, as many as the disk has room for."""
        room = disk_room_bytes(self._path)
        for place, (_, value) in enumerate(items):
            room -= len(value)
            if room < 0:
                return items[:place]
        return items

    def _shed(self, env: Any, tables: Tables) -> None:
        env.reader_check()
        with env.begin(write=True) as txn:
            tables.shed(txn, random.Random())
        with env.begin(write=True) as txn:  # what a transaction frees can be used by the next but one
            tables.touch(txn)

    def _read_last_txn(self) -> int | None:
        try:
            env = self._lmdb.open(str(self._path), readonly=True, lock=False, max_dbs=Tables.COUNT)
        except self._lmdb.Error:
            return None
        try:
            return env.info()["last_txnid"]
        finally:
            env.close()


def import_lmdb() -> Any:
    """Return the module.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import lmdb
    except ImportError as error:
        raise ImportError("backend \"lmdb\" needs the package lmdb: pip install 'bagua[cache]'") from error
    return lmdb

"""A process's client of a store: the open store and its writer thread.

All loaders of a process that name the same backend share one. A forked or spawned process opens its own at its first
use, so a loader may be handed to DataLoader workers of any kind.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import util

from bagua.data.cache.backends import Backend
from bagua.data.cache.job_servers import stop_servers
from bagua.data.cache.lmdb_directory import leave_job_directories
from bagua.data.cache.store import Buffer, Store, StoreStatus
from bagua.data.cache.writer import Writer

__all__ = ["Client", "arrange_exit", "claim", "close_all", "connect", "forget_claims", "release"]

_EXIT_S = 10.0  # how long the end of a process waits for its last entries


@dataclass(eq=False)
class Client:
    """An open store and its writer.

    Attributes:
        store: reading and writing never raise StoreError.
        writer: of this process.
        pid: the process.
        closed: whether it was closed.
    """

    store: Store
    writer: Writer
    pid: int = field(default_factory=os.getpid)
    closed: bool = False

    @property
    def usable(self) -> bool:
        """Whether it is open, and this process's own."""
        return not self.closed and self.pid == os.getpid()

    def find(self, keys: Sequence[bytes]) -> list[Buffer | None]:
        """Return entries, those not written yet included."""
        found: list[Buffer | None] = [self.writer.find(key) for key in keys]
        places = [place for place, entry in enumerate(found) if entry is None]
        for place, entry in zip(places, self.store.mget([keys[p] for p in places]), strict=True):
            found[place] = entry
        return found

    def status(self) -> StoreStatus:
        """Write what is pending and return what the store says."""
        self.writer.flush()
        return self.store.status()

    def close(self, timeout_s: float | None = None) -> None:
        """Write what is pending and close the store."""
        self.closed = True
        self.writer.close(timeout_s)
        self.store.close()


_clients: dict[Backend, Client] = {}
_claims: dict[Backend, dict[str, bytes]] = {}
_inherited: list[dict[Backend, Client]] = []  # kept forever: their sockets and files are the parent's to close
_lock = threading.RLock()
_arranged_pid = 0


def connect(backend: Backend, buffer_size: int) -> Client:
    """Return this process's client of `backend`, opening it if need be.

    Raises:
        what opening the store raises.
    """
    arrange_exit()
    with _lock:
        client = _clients.get(backend)
        if client is None:
            store = backend.open()
            client = _clients[backend] = Client(store, Writer(store, buffer_size, backend.copies))
        client.writer.buffer_size = max(client.writer.buffer_size, buffer_size)
        return client


def release(backend: Backend) -> None:
    """Close this process's client of `backend`, for all its loaders; another use opens it again."""
    with _lock:
        client = _clients.pop(backend, None)
        if not backend.outlives:
            _claims.pop(backend, None)
    if client is not None:
        client.close()


def claim(backend: Backend, name: str, outline: bytes) -> bytes:
    """Note that a dataset with `outline` uses `name` in the store of `backend`; returns the first one's that did."""
    with _lock:
        return _claims.setdefault(backend, {}).setdefault(name, outline)


def forget_claims(backend: Backend) -> None:
    """The store of `backend` is empty."""
    with _lock:
        _claims.pop(backend, None)


def arrange_exit() -> None:
    """Have this process write what is pending when it ends. Repeated calls are free."""
    global _arranged_pid
    if _arranged_pid == os.getpid():
        return
    with _lock:
        if _arranged_pid == 0:
            os.register_at_fork(after_in_child=_after_fork)
            atexit.register(close_all)
        _arranged_pid = os.getpid()
        # Children of multiprocessing end without atexit, but run these.
        util.Finalize(None, close_all, exitpriority=50)


def close_all() -> None:
    """Write what is pending, close all stores, then end and remove what was the job's."""
    with _lock:
        while _clients:
            _clients.popitem()[1].close(_EXIT_S)
        _claims.clear()
    leave_job_directories()
    stop_servers()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _inherited.append(dict(_clients))
    _clients.clear()

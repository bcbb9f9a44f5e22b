"""A `torch.distributed` store with a time limit per call.

torch's TCPStore client reads its socket without a deadline. If the process that serves it is stopped, or one of the two
is cut off from the network, a call returns when TCP gives up: after a quarter of an hour or never. So calls run in a
daemon thread, and who calls waits for no longer than a limit. A call that came back late is dropped; later ones work
again.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from bagua.comm.gloo_connections import GlooConnections
from bagua.comm.own_threads import start_thread
from bagua.errors import CommunicationError

__all__ = ["BoundedStore", "RendezvousStore", "root_of"]

_IDLE_S = 0.1  # after so long without a call the thread ends; the next call starts another one
_POLL_S = (0.0005, 0.05)  # first and longest sleep between two looks into the store
_SHARE = 0.1  # what comes is seen late by that share of the time that it took
_ALERT_S = 0.1  # between two alerts while a key is waited for
_LATE_S = 0.5  # after so long without an answer, and then again and again, a call raises an alert
_GRACE_S = 3.0  # for a last call, when the time of a wait is over
_T = TypeVar("_T")


def root_of(store: Any) -> Any:
    """The store below all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


class BoundedStore:
    """A `torch.distributed` store, or a part of it, whose calls raise `CommunicationError` instead of blocking.

    Args:
        store: what is called.
        limit_s: longest time for a call.
        alert: called now and then while a call has no answer; may raise.

    Attributes:
        server: who serves it, for messages.
    """

    def __init__(
        self, store: Any, limit_s: float, caller: _Caller | None = None, alert: Callable[[], object] | None = None
    ) -> None:
        self._store, self._limit_s, self._alert = store, limit_s, alert
        # In memory nothing can block, and a thread would only cost time.
        self._caller = None if isinstance(root_of(store), dist.HashStore) else caller or _Caller()
        launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.server = "the launcher, which serves the store" if launcher else "rank 0, which serves the store"

    def within(self, limit_s: float) -> BoundedStore:
        """The same store with another limit."""
        return BoundedStore(self._store, limit_s, self._caller, self._alert)

    def alerted_by(self, alert: Callable[[], object] | None) -> BoundedStore:
        """The same store with another alert."""
        return BoundedStore(self._store, self._limit_s, self._caller, alert)

    def under(self, prefix: str) -> BoundedStore:
        """The keys below a prefix."""
        return BoundedStore(dist.PrefixStore(prefix, self._store), self._limit_s, self._caller, self._alert)

    @property
    def root(self) -> BoundedStore:
        """The whole store, without prefix."""
        return BoundedStore(root_of(self._store), self._limit_s, self._caller, self._alert)

    @property
    def unbounded(self) -> Any:
        """The store itself."""
        return self._store

    def set(self, key: str, value: str | bytes) -> None:
        """Write."""
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Read a key that is there."""
        return self._call(lambda: self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read keys that are there."""
        return self._call(lambda: self._store.multi_get(keys))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._call(lambda: self._store.check(keys))

    def add(self, key: str, number: int) -> int:
        """Count; returns the sum."""
        return self._call(lambda: self._store.add(key, number))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Write if the key holds `expected`; returns its value afterwards."""
        return self._call(lambda: self._store.compare_set(key, expected, value))

    def delete_key(self, key: str) -> bool:
        """Delete; whether it was there."""
        return self._call(lambda: self._store.delete_key(key))

    def clone(self) -> Any:
        """Another connection to what is called, without a limit."""
        return self._call(lambda: self._store.clone())

    def num_keys(self) -> int:
        """Of the whole store, whatever the prefix."""
        return self._call(lambda: self._store.num_keys())

    def list_keys(self) -> list[str]:
        """All keys. Call it of a `root`: a `PrefixStore` of torch lists those of longer prefixes too."""
        return self._call(lambda: self._store.list_keys())

    def await_keys(self, keys: Sequence[str], deadline: float, alert: Callable[[], object] | None = None) -> list[str]:
        """Wait until all keys are there; returns those that are not at `deadline` (`time.monotonic`).

        Args:
            alert: called now and then between two looks, in place of the store's own; may raise.
        """
        since = alerted = time.monotonic()
        alert = alert or self._alert
        # Polling, not store.wait(): that holds the client's lock, and watchdogs and lanes need the store too.
        while not self.within(max(deadline - time.monotonic(), _GRACE_S)).check(keys):
            now = time.monotonic()
            if now > deadline:
                last = self.within(_GRACE_S)
                return [key for key in keys if not last.check([key])]
            if alert is not None and now > alerted + _ALERT_S:
                alert()
                alerted = time.monotonic()
            time.sleep(min(max(_SHARE * (now - since), _POLL_S[0]), _POLL_S[1]))
        return []

    def _call(self, call: Callable[[], _T]) -> _T:
        job = None if self._caller is None else self._caller.begin(call)
        if job is not None and not job.await_end(self._limit_s, self._alert):
            raise CommunicationError(
                f"{self.server}, gave no answer within {self._limit_s:.3g} s: it has stopped or exited, or the network "
                "between it and this rank is cut"
            )
        try:
            return call() if job is None else job.outcome()
        except (RuntimeError, OSError) as error:
            raise CommunicationError(f"the store is unreachable; {self.server}, is probably gone: {error}") from error


class _Job:
    """One call. The lock is held until it has ended."""

    __slots__ = ("call", "dropped", "ended", "error", "result")

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call: Callable[[], Any] | None = call
        self.result: Any = None
        self.error: Exception | None = None
        self.dropped = False
        self.ended = threading.Lock()
        self.ended.acquire()

    def await_end(self, limit_s: float, alert: Callable[[], object] | None) -> bool:
        """Whether the call ends within `limit_s`. If not, or if `alert` raises, it is dropped."""
        deadline = time.monotonic() + limit_s
        try:
            while True:
                left_s = max(deadline - time.monotonic(), 0.0)
                if self.ended.acquire(timeout=left_s if alert is None else min(left_s, _LATE_S)):
                    return True
                if alert is None or time.monotonic() > deadline:
                    self.dropped = True
                    return False
                alert()
        except BaseException:
            self.dropped = True
            raise

    def outcome(self) -> Any:
        """What the call has returned; raises what it has raised."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame: no cycle, which would keep the client of the store
        return self.result


class _Caller:
    """Runs calls one after the other, as the client's lock would, in a thread that ends when there are none."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[_Job] = queue.Queue()
        self._lock = threading.Lock()
        self._working = False

    def begin(self, call: Callable[[], Any]) -> _Job:
        """Have `call` run once those before it have ended."""
        job = _Job(call)
        with self._lock:
            self._jobs.put(job)
            if not self._working:
                start_thread(self._work, "bagua-store")
                self._working = True
        return job

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._working = False
                        return
                continue
            if job.call is not None and not job.dropped:
                try:
                    job.result = job.call()
                except Exception as error:  # raised where the call was made
                    job.error = error
            job.call = None  # it must not keep alive what its caller holds
            job.ended.release()
            del job


class RendezvousStore(dist.Store):
    """The store through which gloo connects a group: its calls end in time, and it records the keys of this rank.

    Args:
        store: for this group alone.
        ranks: members of the group, for messages.
        alert: called now and then while it waits for a key or for the store; may raise.
        finds: find the connections without `alert` too.

    Attributes:
        written: keys of this rank.
        connections: of the group; None if nobody asks for them.
    """

    def __init__(
        self,
        store: BoundedStore,
        ranks: Sequence[int],
        alert: Callable[[], object] | None = None,
        finds: bool = False,
    ) -> None:
        super().__init__()
        self._store, self._ranks = store.alerted_by(alert), tuple(ranks)
        self.written: list[str] = []
        self.connections = GlooConnections() if finds or alert is not None else None

    def set(self, key: str, value: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write."""
        self.written.append(key)
        if self.connections is not None:
            self.connections.published(value)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read a key that is there."""
        value = self._store.get(key)
        if self.connections is not None:
            self.connections.found(value)
        return value

    def check(self, keys: list[str]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Whether all keys are there."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Until all keys are there."""
        absent = self._store.await_keys(keys, time.monotonic() + timeout.total_seconds())
        if absent:
            late = ", ".join(map(self._publisher, absent))
            raise CommunicationError(f"{late} published no address within {timeout.total_seconds():g} s")

    def _publisher(self, key: str) -> str:
        """Who writes a key of gloo, which ends in the number of a member: "0/2"."""
        number = key.rpartition("/")[2]
        if number.isdecimal() and int(number) < len(self._ranks):
            return f"rank {self._ranks[int(number)]}"
        return f"the writer of {key!r}"

"""Background writer: a thread collects entries and writes them to the store in batches."""

from __future__ import annotations

import logging
import threading
import time

from bagua.data.cache.frame import seal_frame
from bagua.data.cache.store import Store

__all__ = ["Writer"]

_log = logging.getLogger("bagua")
_BATCH_BYTES = 32 << 20
_MAX_PENDING_BYTES = 256 << 20
_SPARE_BYTES = 64 << 20
_LINGER_S = 0.05


class Writer:
    """A thread that writes to `store`.

    A batch goes when there are `buffer_size` entries, when the oldest has waited 50 ms (the end of an epoch needs no
    signal), on `flush` and on `close`. `put` blocks while 256 MiB are
    pending.

    Args:
        store: does not raise StoreError; see FallbackStore.
        buffer_size: entries in a batch.
        reuse: whether memory of written entries is used again, since the store keeps copies. New memory costs more
            than the copy that goes there: the system clears it page by page.
    """

    def __init__(self, store: Store, buffer_size: int, reuse: bool = True) -> None:
        self._store = store
        self._reuse = reuse
        self._spare: dict[int, list[bytearray]] = {}  # by size
        self._spare_bytes = 0
        self.buffer_size = buffer_size
        self._pending: dict[bytes, bytearray] = {}
        self._pending_bytes = 0
        self._oldest = 0.0
        self._flushing = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def allocate(self, nbytes: int) -> bytearray:
        """Return memory for an entry; its content is arbitrary."""
        with self._changed:
            spare = self._spare.get(nbytes)
            if spare:
                self._spare_bytes -= nbytes
                return spare.pop()
        return bytearray(nbytes)

    def put(self, key: bytes, frame: bytearray) -> None:
        """Have an entry written; `frame` is the writer's from now on."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending_bytes < _MAX_PENDING_BYTES or self._closed)
            if self._closed:
                return
            if not self._pending:
                self._oldest = time.monotonic()
            self._pending_bytes += len(frame) - len(self._pending.pop(key, b""))
            self._pending[key] = frame
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="bagua-cache-writer", daemon=True)
                self._thread.start()
            elif len(self._pending) in (1, self.buffer_size):
                self._changed.notify_all()

    def find(self, key: bytes) -> bytearray | None:
        """Return a copy of an entry that is not written yet, or None."""
        if key not in self._pending:
            return None
        with self._changed:  # once it is written, its memory is another's
            frame = self._pending.get(key)
            if frame is None:
                return None
            copy = bytearray(frame)
        seal_frame(copy)
        return copy

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was put before is written; whether it was within `timeout_s`."""
        with self._changed:
            waiting = dict(self._pending)
            self._flushing += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(
                    lambda: all(self._pending.get(key) is not frame for key, frame in waiting.items()), timeout_s
                )
            finally:
                self._flushing -= 1

    def close(self, timeout_s: float | None = None) -> None:
        """Flush, and end the thread."""
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                self._changed.wait_for(self._due, max(0.0, self._oldest + _LINGER_S - time.monotonic()))
                if self._closed:
                    return
                batch = self._take()
            self._write(batch)
            with self._changed:
                for key, frame in batch:
                    if self._pending.get(key) is frame:  # else it was put anew meanwhile
                        del self._pending[key]
                        self._pending_bytes -= len(frame)
                    self._keep(frame)
                self._oldest = time.monotonic()
                self._changed.notify_all()

    def _keep(self, frame: bytearray) -> None:
        """Have the memory of a written entry used again, unless that would be too much."""
        if not self._reuse:
            return
        if self._spare_bytes + len(frame) > _SPARE_BYTES:
            self._spare.clear()  # of sizes that do not come any more, perhaps
            self._spare_bytes = 0
        if len(frame) <= _SPARE_BYTES:
            self._spare.setdefault(len(frame), []).append(frame)
            self._spare_bytes += len(frame)

    def _due(self) -> bool:
        return len(self._pending) >= self.buffer_size or self._flushing > 0 or self._closed

    def _take(self) -> list[tuple[bytes, bytearray]]:
        batch: list[tuple[bytes, bytearray]] = []
        nbytes = 0
        for key, frame in self._pending.items():
            batch.append((key, frame))
            nbytes += len(frame)
            if nbytes >= _BATCH_BYTES:
                break
        return batch

    def _write(self, batch: list[tuple[bytes, bytearray]]) -> None:
        try:
            for _, frame in batch:
                seal_frame(frame)
            self._store.mset(batch)
        except Exception:  # a store that breaks its promise must not end the thread: putters would wait forever
            _log.warning("the cache could not write %d entries", len(batch), exc_info=True)

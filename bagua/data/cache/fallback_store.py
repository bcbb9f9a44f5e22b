"""A store that may fail: training continues without it, and uses it again when it responds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from bagua.data.cache.store import Buffer, EntryTooLargeError, Store, StoreError, StoreFullError, StoreStatus

__all__ = ["FallbackStore"]

_log = logging.getLogger("bagua")
_FIRST_RETRY_S, _LAST_RETRY_S = 0.25, 8.0
_REST_S = 5.0  # without writing, after a store said that it is full


class FallbackStore:
    """Wraps `store`: reading and writing never raise StoreError.

    While the store is unreachable there are no entries and writes are dropped; a thread polls whether
    it responds again. A store that is full is read, and written again after a few seconds. Entries that are too large
    for it are left out. The first failure of each
    kind in a process is a warning in the log "bagua", later ones are on level INFO.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._lock = threading.Lock()
        self._away = False
        self._closed = threading.Event()
        self._rest_until = 0.0
        self._warned: set[str] = set()

    def get(self, key: bytes) -> Buffer | None:
        """Return the value, or None, also if the store is unreachable."""
        return self.mget([key])[0]

    def mget(self, keys: Sequence[bytes]) -> list[Buffer | None]:
        """Return the values of `keys`, all None if the store is unreachable."""
        if not self._away:
            try:
                return self._store.mget(keys) if len(keys) > 1 else [self._store.get(keys[0])] if keys else []
            except StoreError as error:
                self._lose(error)
        return [None] * len(keys)

    def set(self, key: bytes, value: Buffer) -> None:
        """Keep `value` if the store takes it."""
        self.mset([(key, value)])

    def mset(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """Keep what the store takes."""
        if self._away or time.monotonic() < self._rest_until:
            return
        try:
            self._store.mset(items)
        except EntryTooLargeError as error:  # says nothing of other entries
            self._tell("large", f"samples too large for the cache are computed each time: {error}")
        except StoreFullError as error:
            self._rest_until = time.monotonic() + _REST_S
            self._tell("full", f"the cache accepts no more entries; samples that it lacks are computed: {error}")
        except StoreError as error:
            self._lose(error)

    def num_keys(self) -> int:
        """Return the number of entries. Raises StoreError."""
        return self._store.num_keys()

    def clear(self) -> None:
        """Remove all entries. Raises StoreError."""
        self._store.clear()

    def status(self) -> StoreStatus:
        """Return the store's status, or that it is unavailable."""
        try:
            return self._store.status()
        except StoreError:
            return StoreStatus(False)

    def close(self) -> None:
        """Stop asking, and close the store."""
        self._closed.set()
        self._store.close()

    def _lose(self, error: StoreError) -> None:
        with self._lock:
            if self._away or self._closed.is_set():
                return
            self._away = True
        self._tell("away", f"the cache is unreachable; samples are computed until it responds again: {error}")
        threading.Thread(target=self._wait_for_it, name=f"bagua-cache-probe-{self._name}", daemon=True).start()

    def _wait_for_it(self) -> None:
        pause = _FIRST_RETRY_S
        while not self._closed.wait(pause):
            pause = min(2 * pause, _LAST_RETRY_S)
            if self.status().available:
                self._away = False
                _log.info("the cache %s is reachable again", self._name)
                return

    def _tell(self, kind: str, message: str) -> None:
        first = kind not in self._warned
        self._warned.add(kind)
        _log.log(logging.WARNING if first else logging.INFO, "%s", message)

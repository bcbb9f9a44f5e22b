"""The in-process store: a dictionary with a capacity."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from bagua.data.cache.capacity import available_memory_bytes
from bagua.data.cache.store import Buffer, EntryTooLargeError, StoreStatus
from bagua.data.cache.usage import EVICTION, NUM_CANDIDATES, Clock, Usage, choose_victim

__all__ = ["MemoryStore"]

_OVERHEAD_BYTES = 256  # of the dictionaries, an entry


class MemoryStore:
    """Store in this process's memory. DataLoader workers have one each, which they do not share.

    Args:
        capacity_bytes: where eviction begins; None: half of the memory that is free now.
        zero_copy: whether samples share their memory with the store. Whoever writes to such a sample in place
            damages the entry; the checksum shows it, and the sample is computed anew.
    """

    def __init__(self, capacity_bytes: int | None = None, zero_copy: bool = False) -> None:
        self._capacity_bytes = capacity_bytes or available_memory_bytes() // 2
        self._zero_copy = zero_copy
        self._entries: dict[bytes, Buffer] = {}
        self._usage: dict[bytes, Usage] = {}
        self._keys: list[bytes] = []  # to draw from; a key's place is in _places
        self._places: dict[bytes, int] = {}
        self._clock = Clock()
        self._random = random.Random(0)
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Buffer | None:
        """Return the value or None."""
        with self._lock:
            value = self._entries.get(key)
            if value is None:
                return None
            self._usage[key] = self._usage[key].used(self._clock.tick)
        return value if self._zero_copy else memoryview(value).toreadonly()

    def mget(self, keys: Sequence[bytes]) -> list[Buffer | None]:
        """Return the values of `keys`."""
        return [self.get(key) for key in keys]

    def set(self, key: bytes, value: Buffer) -> None:
        """Keep `value` itself, not a copy."""
        nbytes = len(value) + _OVERHEAD_BYTES
        if nbytes > self._capacity_bytes:
            raise EntryTooLargeError(f"{len(value)} bytes are more than the capacity of {self._capacity_bytes}")
        with self._lock:
            old = self._usage.get(key)
            room = self._capacity_bytes + (old.nbytes if old else 0) - nbytes
            while self._clock.used_bytes > room:
                if not self._evict(key):
                    return
            self._clock.used_bytes += nbytes - (old.nbytes if old else 0)
            if old is None:
                self._places[key] = len(self._keys)
                self._keys.append(key)
            self._entries[key] = value
            self._usage[key] = Usage(1, self._clock.tick, nbytes)

    def mset(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """Keep several values."""
        too_large: EntryTooLargeError | None = None
        for key, value in items:
            try:
                self.set(key, value)
            except EntryTooLargeError as error:
                too_large = error
        if too_large is not None:
            raise too_large

    def num_keys(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            for kept in (self._entries, self._usage, self._keys, self._places):
                kept.clear()
            self._clock = Clock()

    def status(self) -> StoreStatus:
        """Return sizes and policy."""
        clock = self._clock
        return StoreStatus(True, self.num_keys(), clock.used_bytes, self._capacity_bytes, clock.num_evicted, EVICTION)

    def close(self) -> None:
        """Give the memory back."""
        self.clear()

    def _evict(self, newcomer: bytes) -> bool:
        """Make room by one entry, not the newcomer's own; False if the newcomer has to go without."""
        drawn = self._random.sample(self._keys, min(NUM_CANDIDATES, len(self._keys)))
        candidates = [(key, self._usage[key]) for key in drawn if key != newcomer]
        victim = choose_victim(candidates, self._clock.tick)
        self._clock.press(len(self._keys))
        if victim is None:
            return False
        key, usage = victim
        place, last = self._places.pop(key), self._keys.pop()
        if last != key:
            self._keys[place], self._places[last] = last, place
        del self._entries[key], self._usage[key]
        self._clock.used_bytes -= usage.nbytes
        self._clock.num_evicted += 1
        return True

"""The tables of the LMDB file: entries, usage counts, and one record of totals."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bagua.data.cache.store import Buffer
from bagua.data.cache.usage import NUM_CANDIDATES, Clock, Usage, choose_victim

__all__ = ["Tables"]

_CLOCK_KEY = b"clock"
_PAGE_BYTES = 4096
_IN_PAGE_BYTES = 1900  # larger values get pages of their own
_SHED = 8  # this part of the bytes goes at once when the file is too scattered


class Tables:
    """The three tables of an environment. Methods take the transaction they are to work in.

    Args:
        env: an open environment.
        capacity_bytes: where eviction begins, None: nowhere.
    """

    COUNT = 3

    def __init__(self, env: Any, capacity_bytes: int | None) -> None:
        self.entries = env.open_db(b"entries")
        self._usage = env.open_db(b"usage")
        self._sums = env.open_db(b"sums")
        self._capacity_bytes = capacity_bytes
        self._random = random.Random(os.urandom(8))

    def clock(self, txn: Any) -> Clock:
        """Return the sums."""
        raw = txn.get(_CLOCK_KEY, db=self._sums)
        return Clock() if raw is None else Clock.unpack(raw)

    def write(self, txn: Any, items: Sequence[tuple[bytes, Buffer]], hits: Mapping[bytes, int]) -> int:
        """Put entries, evicting others where need be; note how often entries were read since the last write.

        Returns:
            the size of the largest that was left out because it is larger than half of the capacity; 0: none was.
        """
        clock = self.clock(txn)
        for key, times in list(hits.items()):  # readers may still add to it
            raw = txn.get(key, db=self._usage)
            if raw is not None:
                txn.put(key, Usage.unpack(raw).used(clock.tick, times).pack(), db=self._usage)
        too_large = 0
        for key, value in items:
            nbytes = room(key, value)
            if self._capacity_bytes is not None and nbytes > self._capacity_bytes // 2:
                too_large = max(too_large, len(value))
                continue
            raw = txn.get(key, db=self._usage)
            old = Usage.unpack(raw) if raw is not None else Usage(0, clock.tick, 0)
            if self._make_room(txn, clock, nbytes - old.nbytes, key):
                txn.put(key, value, db=self.entries)
                txn.put(key, Usage(1, clock.tick, nbytes).used(clock.tick, old.at(clock.tick)).pack(), db=self._usage)
                clock.used_bytes += nbytes - old.nbytes
        txn.put(_CLOCK_KEY, clock.pack(), db=self._sums)
        return too_large

    def shed(self, txn: Any, rng: random.Random) -> None:
        """Remove an eighth of the bytes, the least used of some drawn at random first."""
        clock = self.clock(txn)
        target = clock.used_bytes - clock.used_bytes // _SHED
        while clock.used_bytes > target and self._num_keys(txn):
            key, usage = min(self._draw(txn, rng), key=lambda pair: pair[1].at(clock.tick))
            self._remove(txn, clock, key, usage)
        txn.put(_CLOCK_KEY, clock.pack(), db=self._sums)

    def touch(self, txn: Any) -> None:
        """Write something, so that there is a transaction."""
        txn.put(_CLOCK_KEY, self.clock(txn).pack(), db=self._sums)

    def clear(self, txn: Any) -> None:
        """Remove everything."""
        for table in (self.entries, self._usage, self._sums):
            txn.drop(table, delete=False)

    def _make_room(self, txn: Any, clock: Clock, nbytes: int, newcomer: bytes) -> bool:
        """Evict until `nbytes` more fit; False if the newcomer has to go without."""
        if self._capacity_bytes is None:
            return True
        while clock.used_bytes + nbytes > self._capacity_bytes:
            num_keys = self._num_keys(txn)
            candidates = [pair for pair in self._draw(txn, self._random) if pair[0] != newcomer]
            victim = choose_victim(candidates, clock.tick)
            clock.press(num_keys)
            if victim is None and clock.used_bytes > self._capacity_bytes and candidates:
                victim = min(candidates, key=lambda pair: pair[1].at(clock.tick))  # an earlier job had more room
            if victim is None:
                return False
            self._remove(txn, clock, *victim)
        return True

    def _draw(self, txn: Any, rng: random.Random) -> Iterator[tuple[bytes, Usage]]:
        """Entries at random: keys are digests, so the next key after a random one is any with the same chance."""
        with txn.cursor(db=self._usage) as cursor:
            for _ in range(NUM_CANDIDATES):
                if cursor.set_range(rng.randbytes(16)) or cursor.first():
                    yield bytes(cursor.key()), Usage.unpack(cursor.value())

    def _remove(self, txn: Any, clock: Clock, key: bytes, usage: Usage) -> None:
        txn.delete(key, db=self.entries)
        txn.delete(key, db=self._usage)
        clock.used_bytes -= usage.nbytes
        clock.num_evicted += 1

    def _num_keys(self, txn: Any) -> int:
        return txn.stat(self._usage)["entries"]


def room(key: bytes, value: Buffer) -> int:
    """Bytes that an entry takes in the file, its share of the tree included."""
    nbytes = len(key) + len(value) + 16
    if nbytes > _IN_PAGE_BYTES:
        return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES + 256
    return nbytes * 2 + 128  # pages of a tree are between half and all full

"""Eviction policy: least frequently used, with counts that decay.

Epochs read every sample once, in another order each time. With room for half of the samples, evicting the least
recently used would keep some 15 % of them useful, keeping what is there keeps 50 %. So an entry is replaced only by
one that is used more often. Lest the entries of a data set that nobody reads any more stay forever, counts are
halved whenever the cache has turned away or evicted twice as many entries as it holds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = ["EVICTION", "NUM_CANDIDATES", "Clock", "Usage", "choose_victim"]

EVICTION = "least frequently used of 16 drawn at random, counts halved as time goes by"
NUM_CANDIDATES = 16
_MAX_COUNT = 7
_USAGE = struct.Struct("<BxxxIQ")
_CLOCK = struct.Struct("<IxxxxQQQ")


@dataclass(frozen=True)
class Usage:
    """How often an entry was used lately.

    Attributes:
        count: uses, as of `tick`; at most 7.
        tick: when it was last counted.
        nbytes: room that the entry takes.
    """

    count: int
    tick: int
    nbytes: int

    def at(self, tick: int) -> int:
        """The count, faded to `tick`."""
        return self.count >> min(31, max(0, tick - self.tick))

    def used(self, tick: int, times: int = 1) -> Usage:
        """The same entry after more uses."""
        return replace(self, count=min(_MAX_COUNT, self.at(tick) + times), tick=tick)

    def pack(self) -> bytes:
        """Return it as 16 bytes."""
        return _USAGE.pack(self.count, self.tick & 0xFFFFFFFF, self.nbytes)

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> Usage:
        """The inverse of `pack`."""
        return cls(*_USAGE.unpack(raw))


@dataclass
class Clock:
    """Counters of a bounded store.

    Attributes:
        tick: how often counts were halved.
        pressed: entries turned away or evicted since the last tick.
        used_bytes: room that all entries take.
        num_evicted: entries evicted so far.
    """

    tick: int = 0
    pressed: int = 0
    used_bytes: int = 0
    num_evicted: int = 0

    def press(self, num_keys: int) -> None:
        """Count an entry that found no room, or lost it; `num_keys` are in the store."""
        self.pressed += 1
        if self.pressed > 2 * num_keys:
            self.tick, self.pressed = self.tick + 1, 0

    def pack(self) -> bytes:
        """Return it as 32 bytes."""
        return _CLOCK.pack(self.tick & 0xFFFFFFFF, self.pressed, self.used_bytes, self.num_evicted)

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> Clock:
        """The inverse of `pack`."""
        return cls(*_CLOCK.unpack(raw))


def choose_victim(candidates: Iterable[tuple[bytes, Usage]], tick: int) -> tuple[bytes, Usage] | None:
    """Return the least used of `candidates` if a new entry, used once, may take its place, else None."""
    victim = min(candidates, key=lambda pair: (pair[1].at(tick), pair[1].tick), default=None)
    return victim if victim is not None and victim[1].at(tick) < 1 else None

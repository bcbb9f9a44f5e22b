"""Interface of cache backends: bytes stored under keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Buffer", "EntryTooLargeError", "Store", "StoreError", "StoreFullError", "StoreStatus"]

Buffer = bytes | bytearray | memoryview


class StoreError(RuntimeError):
    """The store cannot be reached, or is damaged."""


class StoreFullError(StoreError):
    """The store's memory or disk is full. Its entries can still be read."""


class EntryTooLargeError(StoreFullError):
    """Some entries are too large for the store, however empty it is. The others of the call were kept."""


@dataclass(frozen=True)
class StoreStatus:
    """Status of a store.

    Attributes:
        available: whether it answers.
        num_keys: entries of all datasets in it.
        used_bytes: what they take, as far as the backend knows.
        capacity_bytes: where eviction begins; None if nothing is evicted.
        num_evicted: entries that made room for others, as far as the backend knows.
        eviction: the policy, in words.
    """

    available: bool
    num_keys: int = 0
    used_bytes: int = 0
    capacity_bytes: int | None = None
    num_evicted: int = 0
    eviction: str = "none"


class Store(Protocol):
    """Bytes under keys of at most 64 bytes. Methods may be called from several threads at once.

    All methods raise StoreError where the store cannot do its work, and nothing else.
    """

    def get(self, key: bytes) -> Buffer | None:
        """Return the value or None. A bytearray is the caller's own; anything else must not be written to."""
        ...

    def mget(self, keys: Sequence[bytes]) -> list[Buffer | None]:
        """Return the values of `keys`, None where there is none."""
        ...

    def set(self, key: bytes, value: Buffer) -> None:
        """Keep `value` under `key`, in place of what was there."""
        ...

    def mset(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """Keep several values.

        Raises:
            EntryTooLargeError: some can never fit; the others were kept.
            StoreFullError: some of them did not fit.
        """
        ...

    def num_keys(self) -> int:
        """Return the number of entries, those of all datasets."""
        ...

    def clear(self) -> None:
        """Remove all entries."""
        ...

    def status(self) -> StoreStatus:
        """Return what the store says of itself."""
        ...

    def close(self) -> None:
        """Give back what this process holds of the store. Entries stay where the backend outlives the process."""
        ...

"""The original's interface of key-value stores, and a store made of several."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

__all__ = ["ClusterStore", "Store"]

Value = str | bytes


class Store(ABC):
    """Values by key. Keys are str; what is read is bytes, or None where there is nothing."""

    @abstractmethod
    def set(self, key: str, value: Value) -> None:
        """Keep `value`."""

    @abstractmethod
    def get(self, key: str) -> Value | None:
        """Return the value of `key`."""

    @abstractmethod
    def num_keys(self) -> int:
        """Return the number of keys."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all."""

    def mset(self, dictionary: Mapping[str, Value]) -> None:
        """Keep several."""
        for key, value in dictionary.items():
            self.set(key, value)

    def mget(self, keys: Sequence[str]) -> list[Value | None]:
        """Return the values of `keys`."""
        return [self.get(key) for key in keys]

    def status(self) -> bool:
        """Whether the store answers."""
        return True

    def shutdown(self) -> None:
        """Let go of what the store holds."""


class ClusterStore(Store):
    """Keys spread over `stores` by a hash.

    Args:
        stores: in the same order in all processes.

    Raises:
        ValueError: no stores.

    Differs: the hash is CRC-32, the original's needs a package of its own; keys that it wrote are elsewhere.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = list(stores)
        if not self.stores:
            raise ValueError("stores: expected at least one")

    def route(self, key: str) -> Store:
        """Return the store that has `key`."""
        return self.stores[zlib.crc32(key.encode()) % len(self.stores)]

    def set(self, key: str, value: Value) -> None:
        """Keep `value` on its store."""
        self.route(key).set(key, value)

    def get(self, key: str) -> Value | None:
        """Ask its store."""
        return self.route(key).get(key)

    def mset(self, dictionary: Mapping[str, Value]) -> None:
        """One call to each store."""
        for store in self.stores:
            part = {key: value for key, value in dictionary.items() if self.route(key) is store}
            if part:
                store.mset(part)

    def mget(self, keys: Sequence[str]) -> list[Value | None]:
        """One call to each store."""
        found: dict[str, Value | None] = {}
        for store in self.stores:
            part = [key for key in dict.fromkeys(keys) if self.route(key) is store]
            if part:
                found.update(zip(part, store.mget(part), strict=True))
        return [found[key] for key in keys]

    def num_keys(self) -> int:
        """Of all stores."""
        return sum(store.num_keys() for store in self.stores)

    def clear(self) -> None:
        """Clear all stores."""
        for store in self.stores:
            store.clear()

    def status(self) -> bool:
        """Whether all stores answer."""
        return all(store.status() for store in self.stores)

    def shutdown(self) -> None:
        """Let go of all stores."""
        for store in self.stores:
            store.shutdown()

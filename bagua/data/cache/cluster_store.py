"""A sharded store: each key on one of several stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bagua.data.cache.ring import Ring
from bagua.data.cache.store import Buffer, Store, StoreStatus

__all__ = ["ClusterStore"]


class ClusterStore:
    """Entries spread over `stores` by consistent hashing of their keys.

    While a store is unreachable its keys are misses; they do not move to the others.

    Args:
        stores: by name; names decide where keys go, so they must be alike in all processes.
    """

    def __init__(self, stores: Mapping[str, Store]) -> None:
        self._stores = dict(stores)
        self._ring = Ring(list(self._stores))

    def get(self, key: bytes) -> Buffer | None:
        """Return the value or None."""
        return self._stores[self._ring.owner(key)].get(key)

    def mget(self, keys: Sequence[bytes]) -> list[Buffer | None]:
        """Return the values of `keys`, with one question to each store."""
        found: list[Buffer | None] = [None] * len(keys)
        owners = [self._ring.owner(key) for key in keys]
        for name in dict.fromkeys(owners):
            places = [place for place, owner in enumerate(owners) if owner == name]
            for place, value in zip(places, self._stores[name].mget([keys[p] for p in places]), strict=True):
                found[place] = value
        return found

    def set(self, key: bytes, value: Buffer) -> None:
        """Keep `value` on its store."""
        self._stores[self._ring.owner(key)].set(key, value)

    def mset(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """Keep each value on its store."""
        parts: dict[str, list[tuple[bytes, Buffer]]] = {}
        for key, value in items:
            parts.setdefault(self._ring.owner(key), []).append((key, value))
        for name, part in parts.items():
            self._stores[name].mset(part)

    def num_keys(self) -> int:
        """Return the number of entries on all stores."""
        return sum(store.num_keys() for store in self._stores.values())

    def clear(self) -> None:
        """Remove all entries from all stores."""
        for store in self._stores.values():
            store.clear()

    def status(self) -> StoreStatus:
        """Return sums over the stores; available if all are."""
        all_of_them = [store.status() for store in self._stores.values()]
        capacities = [status.capacity_bytes for status in all_of_them]
        known = [capacity for capacity in capacities if capacity is not None]
        return StoreStatus(
            all(status.available for status in all_of_them),
            sum(status.num_keys for status in all_of_them),
            sum(status.used_bytes for status in all_of_them),
            sum(known) if len(known) == len(capacities) else None,
            sum(status.num_evicted for status in all_of_them),
            ", ".join(sorted({status.eviction for status in all_of_them})),
        )

    def close(self) -> None:
        """Close all stores."""
        for store in self._stores.values():
            store.close()

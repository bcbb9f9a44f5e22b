"""Capacity is honoured, and what is kept is of use."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from bagua.data.cache import CacheLoader
from bagua.data.cache.capacity import available_memory_bytes, disk_room_bytes
from bagua.data.cache.fallback_store import FallbackStore
from bagua.data.cache.frame import make_key
from bagua.data.cache.lmdb_store import LmdbStore
from bagua.data.cache.memory_store import MemoryStore
from bagua.data.cache.store import Store, StoreFullError
from bagua.data.cache.usage import Clock, Usage

CAPACITY = 2 << 20
ENTRY = bytes(15_000)  # 16 KiB in the file
NUM_FITTING = CAPACITY // (16 << 10)


@pytest.fixture(params=["memory", "lmdb"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    if request.param == "memory":
        return lambda: MemoryStore(CAPACITY)
    pytest.importorskip("lmdb")
    return lambda: LmdbStore(tmp_path / "cache", CAPACITY)


def epoch(store: Store, keys: list[bytes], rng: random.Random, batch: int = 10) -> float:
    """Read all keys in random order, as training does; return the rate of hits."""
    rng.shuffle(keys)
    hits, missing = 0, []
    for key in keys:
        if store.get(key) is not None:
            hits += 1
        else:
            missing.append((key, ENTRY))
        if len(missing) == batch:
            store.mset(missing)
            missing = []
            assert store.status().used_bytes <= CAPACITY
    store.mset(missing)
    return hits / len(keys)


def test_half_of_the_samples_fit_and_nearly_half_are_hits(make: Callable[[], Store]) -> None:
    store, rng = make(), random.Random(1)
    keys = [make_key("a", i) for i in range(2 * NUM_FITTING)]
    rates = [epoch(store, keys, rng) for _ in range(5)]
    assert rates[0] == 0
    assert min(rates[1:]) > 0.4, rates
    assert store.status().used_bytes > 0.9 * CAPACITY
    store.close()


def test_a_new_dataset_gets_its_share_after_some_epochs(make: Callable[[], Store]) -> None:
    store, rng = make(), random.Random(1)
    old = [make_key("old", i) for i in range(NUM_FITTING)]
    for _ in range(5):
        epoch(store, old, rng)
    new = [make_key("new", i) for i in range(2 * NUM_FITTING)]
    rates = [epoch(store, new, rng) for _ in range(9)]
    assert rates[0] == 0 and rates[-1] > 0.35, rates
    assert store.status().num_evicted > NUM_FITTING // 2
    store.close()


def test_entries_larger_than_the_capacity_are_refused_and_others_stay(make: Callable[[], Store]) -> None:
    store = make()
    store.set(make_key("a", 1), ENTRY)
    with pytest.raises(StoreFullError):
        store.set(make_key("a", 2), bytes(CAPACITY + 1))
    assert store.num_keys() == 1
    store.close()


def test_replacing_entries_does_not_leak_room(make: Callable[[], Store]) -> None:
    store = make()
    for size in (100, 20_000, 3_000) * 20:
        store.set(make_key("a", 1), bytes(size))
    used = store.status().used_bytes
    store.clear()
    store.set(make_key("a", 1), bytes(3_000))
    assert used == store.status().used_bytes
    store.close()


def test_the_file_stays_within_its_bounds_whatever_the_sizes(cache_path: Path) -> None:
    store, rng = LmdbStore(cache_path, 16 << 20), random.Random(0)
    for _ in range(60):
        items = [(make_key("a", rng.randrange(10_000)), bytes(rng.randrange(100_000))) for _ in range(20)]
        store.mset(items)
        assert store.status().used_bytes <= 16 << 20
    assert (cache_path / "data.mdb").stat().st_size <= (16 << 20) + (64 << 20)
    assert store.status().used_bytes > 14 << 20
    store.close()


def test_a_smaller_capacity_takes_hold_with_the_next_writes(cache_path: Path) -> None:
    store = LmdbStore(cache_path)
    store.mset([(make_key("a", i), ENTRY) for i in range(2 * NUM_FITTING)])
    store.close()
    store = LmdbStore(cache_path, CAPACITY)
    assert store.status().used_bytes > CAPACITY
    store.mset([(make_key("b", i), ENTRY) for i in range(3)])
    assert store.status().used_bytes <= CAPACITY
    store.close()


@pytest.mark.process
def test_a_server_honours_its_capacity(hosts: list) -> None:
    loader = CacheLoader("redis", "big", hosts=hosts[:1])
    for i in range(100):
        loader.get(i, lambda key: bytes(1_000_000))
    status = loader.status()
    assert status.capacity_bytes == 64 << 20 and status.eviction == "allkeys-lfu"
    assert status.num_evicted > 20
    assert 40 < status.num_keys < 70
    loader.clear()


def test_counts_fade() -> None:
    usage = Usage(0, 0, 10).used(0, 100)
    assert [usage.at(tick) for tick in (0, 1, 2, 3, 1000)] == [7, 3, 1, 0, 0]
    assert Usage.unpack(usage.pack()) == usage
    clock = Clock(used_bytes=1 << 40)
    for _ in range(21):
        clock.press(10)
    assert (clock.tick, clock.pressed) == (1, 0)
    assert Clock.unpack(clock.pack()) == clock


@pytest.mark.parametrize("capacity", [0, -1, 1000, True, 1.5e9, "1G"])
def test_wrong_capacities_are_refused(capacity: object) -> None:
    with pytest.raises((TypeError, ValueError), match="capacity_per_node"):
        CacheLoader("memory", capacity_per_node=capacity)  # pyright: ignore[reportArgumentType]


def test_what_is_free(tmp_path: Path) -> None:
    assert 1 << 20 < available_memory_bytes() < 1 << 50
    assert 0 <= disk_room_bytes(tmp_path) < 1 << 60


def test_an_entry_that_never_fits_does_not_keep_out_the_others(
    make: Callable[[], Store], caplog: pytest.LogCaptureFixture
) -> None:
    store = FallbackStore(make(), "cache")
    large = bytes(CAPACITY + 1)
    store.mset([(b"a", ENTRY), (b"large", large), (b"b", ENTRY)])
    store.mset([(b"large", large)])
    store.mset([(b"c", ENTRY)])
    found = store.mget([b"a", b"b", b"c", b"large"])
    assert [entry is not None for entry in found] == [True, True, True, False]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and f"too large for the cache are computed each time: {len(large)} bytes" in warnings[0]
    store.close()

"""What every store promises, run over each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bagua.data.cache.cluster_store import ClusterStore
from bagua.data.cache.fallback_store import FallbackStore
from bagua.data.cache.frame import make_key
from bagua.data.cache.lmdb_store import LmdbStore
from bagua.data.cache.memory_store import MemoryStore
from bagua.data.cache.redis_host import RedisHost
from bagua.data.cache.redis_store import RedisStore
from bagua.data.cache.store import Store

pytestmark = pytest.mark.process


@pytest.fixture(params=["memory", "lmdb", "redis", "cluster", "fallback"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param in ("memory", "fallback"):
        made: Store = MemoryStore(1 << 30)
        made = FallbackStore(made, "m") if request.param == "fallback" else made
    elif request.param == "lmdb":
        pytest.importorskip("lmdb")
        made = LmdbStore(tmp_path / "cache")
    else:
        hosts: list[RedisHost] = request.getfixturevalue("hosts")
        made = RedisStore(hosts[0])
        if request.param == "cluster":
            made = ClusterStore({host.name: RedisStore(host) for host in hosts})
    yield made
    made.close()


def key(number: int) -> bytes:
    return make_key("test", number)


def as_bytes(values: list[object]) -> list[bytes | None]:
    return [None if value is None else bytes(value) for value in values]  # pyright: ignore[reportArgumentType]


def test_what_was_set_is_got(store: Store) -> None:
    assert store.get(key(0)) is None
    values = {key(i): bytes([i]) * size for i, size in enumerate([0, 1, 100, 5000, 1_000_000])}
    store.set(key(0), values[key(0)])
    store.mset(list(values.items()))
    assert as_bytes([store.get(k) for k in values]) == list(values.values())
    asked = [key(3), key(99), key(1), key(1)]
    assert as_bytes(list(store.mget(asked))) == [values[key(3)], None, values[key(1)], values[key(1)]]
    assert store.mget([]) == []
    assert store.num_keys() == len(values)


def test_a_second_value_replaces_the_first(store: Store) -> None:
    for value in (b"first", b"a longer second one", b"x"):
        store.set(key(1), value)
        assert as_bytes([store.get(key(1))]) == [value]
    assert store.num_keys() == 1


def test_binary_keys_and_any_buffer(store: Store) -> None:
    items = [(bytes([i, 0, 255, 10, 13]) * 3, bytearray(b"ab\r\n\x00") * i) for i in range(1, 40)]
    store.mset(items)
    assert as_bytes(list(store.mget([k for k, _ in items]))) == [bytes(v) for _, v in items]
    store.set(b"view", memoryview(b"0123")[1:3])
    assert as_bytes([store.get(b"view")]) == [b"12"]


def test_clear_leaves_nothing(store: Store) -> None:
    store.mset([(key(i), b"x" * i) for i in range(50)])
    store.clear()
    assert store.num_keys() == 0 and store.get(key(3)) is None
    store.set(key(3), b"again")
    assert store.num_keys() == 1


def test_status_knows_the_sizes(store: Store) -> None:
    before = store.status().num_evicted
    store.mset([(key(i), b"x" * 10_000) for i in range(10)])
    status = store.status()
    assert status.available and status.num_keys == 10
    assert status.used_bytes >= 100_000
    assert status.num_evicted == before


def test_threads_may_use_it_at_once(store: Store) -> None:
    problems: list[BaseException] = []

    def work(mine: int) -> None:
        try:
            for i in range(20):
                store.mset([(key(100 * mine + i), bytes([mine]) * 3000)])
                assert as_bytes([store.get(key(100 * mine + i))]) == [bytes([mine]) * 3000]
                store.mget([key(j) for j in range(0, 400, 37)])
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems and not any(thread.is_alive() for thread in threads)
    assert store.num_keys() == 80


def test_foreign_keys_on_a_server_are_left_alone(hosts: list[RedisHost]) -> None:
    import redis

    with redis.Redis(host=hosts[0].host, port=hosts[0].port, password=hosts[0].password) as client:
        client.set("theirs", "1")
        store = RedisStore(hosts[0])
        store.set(key(1), b"ours")
        assert store.num_keys() == 1
        store.clear()
        assert client.get("theirs") == b"1" and store.num_keys() == 0
        client.delete("theirs")
        store.close()


@pytest.fixture
def reopened(cache_path: Path) -> Callable[[], LmdbStore]:
    return lambda: LmdbStore(cache_path)


def test_a_file_outlives_its_process(reopened: Callable[[], LmdbStore]) -> None:
    first = reopened()
    first.set(key(1), b"kept")
    with pytest.raises(ValueError, match="already open in this process"):
        reopened()
    first.close()
    second = reopened()
    assert as_bytes([second.get(key(1))]) == [b"kept"]
    second.close()
    assert as_bytes([second.get(key(1))]) == [b"kept"], "it opens again by itself"
    second.close()

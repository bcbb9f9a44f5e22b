"""Whatever happens to the store, samples are right and training goes on."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua.data.cache import CacheLoader, StoreError, StoreFullError, StoreStatus, lmdb_store, writer
from bagua.data.cache.client import connect
from bagua.data.cache.fallback_store import FallbackStore
from bagua.data.cache.frame import make_key
from bagua.data.cache.lmdb_store import LmdbStore
from bagua.data.cache.memory_store import MemoryStore
from bagua.data.cache.redis_host import RedisHost
from bagua.data.cache.redis_server import RedisServer

pytestmark = pytest.mark.process


def wait_until(what: Callable[[], bool], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def sample(key: int) -> dict[str, Any]:
    return {"x": torch.full((1000,), float(key)), "y": key}


def check(loader: CacheLoader, keys: range) -> None:
    for key in keys:
        got = loader.get(key, sample)
        assert got["y"] == key and torch.equal(got["x"], sample(key)["x"])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "bagua" and r.levelno >= logging.WARNING]


def kill(server: RedisServer) -> None:
    """End the server process the hard way; its keeper stays in charge."""
    (child,) = [int(p) for p in children(server._process.pid) if "redis" in name_of(p) or "valkey" in name_of(p)]
    os.kill(child, 9)


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def test_a_server_that_dies_in_mid_epoch_costs_speed_only(
    mortal: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    loader = CacheLoader("redis", hosts=[mortal.host])
    check(loader, range(40))
    check(loader, range(20))
    assert loader.stats.num_hits == 20
    kill(mortal)
    check(loader, range(20, 40))
    for _ in range(3):
        check(loader, range(40))
    wait_until(lambda: bool(warnings_of(caplog)))  # the thread that writes may be the one to notice
    assert len(warnings_of(caplog)) == 1, warnings_of(caplog)
    assert "unreachable" in warnings_of(caplog)[0]
    wait_until(lambda: loader.status().available)

    def hits_again() -> bool:
        before = loader.stats.num_hits
        check(loader, range(5))
        return loader.stats.num_hits > before

    wait_until(hits_again)
    assert len(warnings_of(caplog)) == 1
    assert mortal._password not in caplog.text


def test_half_of_a_cluster_goes_away(
    mortal: RedisServer, hosts: list[RedisHost], caplog: pytest.LogCaptureFixture
) -> None:
    loader = CacheLoader("redis", hosts=[hosts[0], mortal.host])
    check(loader, range(100))
    loader.flush()
    mortal.stop()
    before = loader.stats.num_hits
    check(loader, range(100))
    assert 25 < loader.stats.num_hits - before < 75
    assert len(warnings_of(caplog)) == 1
    for needs_all in (loader.num_keys, loader.clear):
        with pytest.raises(StoreError, match=mortal.host.name):
            needs_all()
    status = loader.status()
    assert not status.available and status.used_bytes > 0


def test_an_unreachable_server_is_an_error_at_the_start(mortal: RedisServer) -> None:
    host = mortal.host
    mortal.stop()
    with pytest.raises(ConnectionError, match=f"hosts: redis at {host.name}"):
        CacheLoader("redis", hosts=[host])


class Moody(MemoryStore):
    """Refuses, breaks or works as told."""

    mood: type[Exception] | None = None
    num_writes = 0

    def mset(self, items: Any) -> None:
        self.num_writes += 1
        if self.mood is not None:
            raise self.mood("moody")
        super().mset(items)

    def get(self, key: bytes) -> Any:
        if self.mood is StoreError:
            raise StoreError("moody")
        return super().get(key)

    def status(self) -> StoreStatus:
        if self.mood is StoreError:
            raise StoreError("moody")
        return super().status()


def test_a_full_store_is_still_read_and_not_asked_again_at_once(caplog: pytest.LogCaptureFixture) -> None:
    moody = Moody(1 << 20)
    store = FallbackStore(moody, "moody")
    store.set(b"a", b"1")
    moody.mood = StoreFullError
    for _ in range(10):
        store.set(b"b", b"2")
    assert bytes(store.get(b"a") or b"") == b"1" and store.get(b"b") is None
    assert moody.num_writes == 2
    assert len(warnings_of(caplog)) == 1 and "no more entries" in warnings_of(caplog)[0]
    store.close()


def test_a_store_that_is_back_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    moody = Moody(1 << 20)
    store = FallbackStore(moody, "moody")
    store.set(b"a", b"1")
    for _ in range(2):
        moody.mood = StoreError
        assert store.get(b"a") is None and store.mget([b"a", b"b"]) == [None, None]
        store.set(b"c", b"dropped")
        assert not store.status().available
        moody.mood = None
        wait_until(lambda: store.get(b"a") is not None)
    assert store.get(b"c") is None
    assert len(warnings_of(caplog)) == 1
    store.close()


@pytest.mark.parametrize("backend", ["memory", "lmdb", "redis"])
def test_damaged_entries_are_computed_anew(backend: str, cache_path: Path, request: pytest.FixtureRequest) -> None:
    options = {"memory": {}, "lmdb": {"path": cache_path}}
    if backend == "redis":
        options["redis"] = {"hosts": request.getfixturevalue("hosts")}
    loader = CacheLoader(backend, "d", **options[backend])
    check(loader, range(4))
    loader.flush()
    store = connect(loader._backend, 1).store
    for key, spoil in enumerate((lambda b: b[:-1], lambda b: b[: len(b) // 2], lambda b: b[:-2000] + bytes(2000))):
        digest = make_key("d", key)
        store.set(digest, bytearray(spoil(bytes(store.get(digest) or b""))))
    store.set(make_key("d", 3), bytes(store.get(make_key("d", 2)) or b""))
    check(loader, range(4))
    assert loader.stats.num_damaged == 4 and loader.stats.num_hits == 0
    loader.flush()
    check(loader, range(4))
    assert loader.stats.num_hits == 4


def test_zero_copy_samples_that_are_written_to_are_computed_anew() -> None:
    loader = CacheLoader("memory", zero_copy=True)
    check(loader, range(2))
    loader.flush()
    first, second = loader.get(0, sample), loader.get(0, sample)
    assert first["x"].data_ptr() == second["x"].data_ptr()
    first["x"] += 1
    check(loader, range(2))
    assert loader.stats.num_damaged == 1


def test_samples_are_the_callers_own() -> None:
    loader = CacheLoader("memory")
    for _ in range(3):
        got = loader.get(1, sample)
        assert got["x"][0] == 1
        got["x"].zero_()
        loader.flush()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    pytest.importorskip("lmdb")
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("needs root, to mount a small file system")
    yield mount
    lmdb_store._fork_lock._before()
    lmdb_store._fork_lock._after_in_parent()  # closes the files
    subprocess.run(["umount", "-l", str(mount)], check=True, timeout=60)


@pytest.mark.parametrize("room", ["checked", "not checked"])
def test_a_full_disk_costs_speed_only(
    small_disk: Path, room: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the cache sees it coming, or the disk says so in the middle of a transaction."""
    if room == "not checked":
        monkeypatch.setattr(lmdb_store, "disk_room_bytes", lambda path: 1 << 40)
        monkeypatch.setattr(writer, "_BATCH_BYTES", 1 << 20)  # else the first transaction may be too large
    loader = CacheLoader("lmdb", path=small_disk / "cache")
    for _ in range(2):
        for key in range(100):
            got = loader.get(key, lambda key: torch.full((50_000,), key))
            assert got.tolist() == [key] * 50_000
    assert len(warnings_of(caplog)) == 1 and "no more entries" in warnings_of(caplog)[0]
    assert 5 < loader.stats.num_hits < 100
    assert 5 < loader.num_keys() < 60
    loader.close()


def test_a_store_that_breaks_its_promise_does_not_stop_the_writer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loader = CacheLoader("memory", writer_buffer_size=1)
    client = connect(loader._backend, 1)
    with monkeypatch.context() as patch:
        patch.setattr(client.store, "mset", lambda items: 1 / 0)
        check(loader, range(3))
        loader.flush()
    check(loader, range(3))
    loader.flush()
    assert loader.num_keys() == 3
    assert "could not write" in warnings_of(caplog)[0]


def test_an_unusable_file_is_a_store_error(cache_path: Path) -> None:
    store = LmdbStore(cache_path)
    store.set(b"a", b"1")
    store.close()
    (cache_path / "data.mdb").write_bytes(b"nonsense" * 4096)
    broken = LmdbStore(cache_path)
    with pytest.raises(StoreError, match="damaged"):
        broken.get(b"a")
    broken.close()
    fresh = LmdbStore(cache_path)
    assert fresh.get(b"a") is None
    fresh.set(b"a", b"2")
    fresh.close()

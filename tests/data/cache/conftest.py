"""Stores that are torn down after each test, and a Redis server for all of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua.data.cache.client import close_all
from bagua.data.cache.redis_host import RedisHost
from bagua.data.cache.redis_server import RedisServer
from bagua.data.cache.redis_store import RedisStore

HAS_SERVER = bool(shutil.which("redis-server") or shutil.which("valkey-server"))
needs_server = pytest.mark.skipif(not HAS_SERVER, reason="neither redis-server nor valkey-server is installed")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """No client, server or directory of one test is there in the next."""
    yield
    close_all()


@pytest.fixture(scope="session")
def servers() -> Iterator[list[RedisServer]]:
    """Two servers on loopback."""
    if not HAS_SERVER:
        pytest.skip("neither redis-server nor valkey-server is installed")
    pytest.importorskip("redis")
    made = [RedisServer("127.0.0.1", 64 << 20) for _ in range(2)]
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def hosts(servers: list[RedisServer]) -> list[RedisHost]:
    """Both servers, empty."""
    for server in servers:
        store = RedisStore(server.host)
        store.clear()
        store.close()
    return [server.host for server in servers]


@pytest.fixture
def mortal(servers: list[RedisServer]) -> Iterator[RedisServer]:
    """A server of this test's own that is started again when it dies."""
    server = RedisServer("127.0.0.1", 64 << 20)
    yield server
    server.stop()


@pytest.fixture
def cache_path(tmp_path: Path) -> Path:
    """A directory for an LMDB cache."""
    pytest.importorskip("lmdb")
    return tmp_path / "cache"

"""The original's cached dataset and cache loader."""

from __future__ import annotations

import logging

import pytest
import torch

from bagua.torch_api import contrib
from bagua.torch_api.contrib.cache_loader import CacheLoader
from bagua.torch_api.contrib.cached_dataset import CachedDataset
from tests.data.cache.conftest import _clean, hosts, needs_server, servers  # noqa: F401  (fixtures)

pytestmark = pytest.mark.process

pytest.importorskip("redis")


class Samples:
    """102 samples, and how many of them were computed."""

    def __init__(self) -> None:
        self.num_computed = 0

    def __len__(self) -> int:
        return 102

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.num_computed += 1
        return torch.full((3, 4), float(index)), index


def test_names() -> None:
    assert contrib.CachedDataset is CachedDataset and contrib.CacheLoader is CacheLoader


@needs_server
def test_two_datasets_on_servers_of_the_jobs_own() -> None:
    samples = Samples()
    for name, num_keys in (("one", 102), ("two", 204)):
        dataset = contrib.CachedDataset(samples, backend="redis", dataset_name=name, capacity_per_node=64 << 20)
        for _ in range(2):
            for index in range(len(dataset)):
                x, y = dataset[index]
                assert y == index and torch.equal(x, torch.full((3, 4), float(index)))
        assert dataset.cache_loader.num_keys() == num_keys == samples.num_computed


@needs_server
@pytest.mark.parametrize("cluster_mode", [True, False])
def test_named_hosts(cluster_mode: bool, hosts: list, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    given = [{"host": host.host, "port": str(host.port), "password": host.password} for host in hosts]
    loader = contrib.CacheLoader(
        backend="redis", dataset_name="x", hosts=given, cluster_mode=cluster_mode, capacity_per_node=107374182400
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [loader.get(key, lambda key: key * 2) for key in ("a", "b", "c")] == ["aa", "bb", "cc"]
    assert loader.num_keys() == 3 and loader.stats.num_hits == 3
    loader.clear()


@needs_server
def test_a_store_by_its_old_name() -> None:
    from bagua.torch_api.contrib.utils.redis_store import RedisStore

    store = RedisStore(cluster_mode=False, capacity_per_node=10_000_000)
    store.clear()
    assert store.num_keys() == 0 and store.status()
    store.set("1", b"one")
    store.mset({"2": "two", "3": b"three"})
    assert store.mget(["1", "2", "5"]) == [b"one", b"two", None]
    assert store.get("3") == b"three" and store.get("6") is None
    assert store.num_keys() == 3
    store.clear()
    assert store.num_keys() == 0
    store.shutdown()

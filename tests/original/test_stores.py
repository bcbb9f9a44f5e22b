"""Stores of keys and values, one or several; two datasets that share a store."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from bagua.torch_api.contrib import CachedDataset
from bagua.torch_api.contrib.utils.store import ClusterStore, Store
from tests.data.cache.conftest import _clean, hosts, needs_server, servers  # noqa: F401  (fixtures)

pytestmark = pytest.mark.process


class _Dict(Store):
    """The least that a store has to do."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def num_keys(self) -> int:
        return len(self.values)

    def clear(self) -> None:
        self.values.clear()


def _check(store: Any) -> None:
    store.clear()
    assert store.num_keys() == 0
    data = [np.random.default_rng(seed).random(10) for seed in range(5)]
    store.set("1", pickle.dumps(data[1]))
    store.mset({str(key): pickle.dumps(data[key]) for key in (2, 3, 4)})
    one, two, missing = store.mget(["1", "2", "5"])
    assert (pickle.loads(one) == data[1]).all() and (pickle.loads(two) == data[2]).all() and missing is None
    assert (pickle.loads(store.get("4")) == data[4]).all() and store.get("6") is None
    assert store.num_keys() == 4 and store.status()


def test_a_store_and_several() -> None:
    _check(_Dict())
    stores = [_Dict() for _ in range(3)]
    _check(ClusterStore(stores))
    assert sum(store.num_keys() for store in stores) == 4


@needs_server
@pytest.mark.parametrize("cluster_mode", [False, True])
def test_redis(hosts: list[Any], cluster_mode: bool) -> None:  # noqa: F811
    from bagua.torch_api.contrib.utils.redis_store import RedisStore

    given = [{"host": host.host, "port": host.port, "password": host.password} for host in hosts]
    store = RedisStore(hosts=given, cluster_mode=cluster_mode)
    _check(store)
    store.clear()
    store.shutdown()


@pytest.mark.parametrize("backend", ["memory", pytest.param("redis", marks=needs_server)])
def test_two_datasets(backend: str) -> None:
    rows = [[(np.random.default_rng([n, i]).random((5, 2)), n * i) for i in range(102)] for n in (1, 2)]
    datasets = [CachedDataset(each, backend=backend, dataset_name=f"d{n}") for n, each in enumerate(rows)]
    datasets[0].cache_loader.store.clear()  # pyright: ignore[reportAttributeAccessIssue]
    for number, (dataset, plain) in enumerate(zip(datasets, rows, strict=True)):
        for _ in range(3):
            for index in range(len(dataset)):
                found, expected = dataset[index], plain[index]
                assert (found[0] == expected[0]).all() and found[1] == expected[1]
        assert dataset.cache_loader.num_keys() == 102 * (number + 1), "one store for both"

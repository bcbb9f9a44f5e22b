"""What the original had in `contrib` (stores, fused optimizers, samplers, loaders), and for Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


def test_stores() -> None:
    from bagua.torch_api.contrib.utils.store import ClusterStore, Store

    class Own(Store):
        def __init__(self) -> None:
            self.kept: dict[str, Any] = {}

        def set(self, key: str, value: Any) -> None:
            self.kept[key] = value

        def get(self, key: str) -> Any:
            return self.kept.get(key)

        def num_keys(self) -> int:
            return len(self.kept)

        def clear(self) -> None:
            self.kept.clear()

    parts = [Own(), Own(), Own()]
    store = ClusterStore(parts)
    store.set("1", b"one")
    store.mset({str(n): str(n).encode() for n in range(2, 40)})
    assert store.get("1") == b"one" and store.mget(["2", "none", "3", "2"]) == [b"2", None, b"3", b"2"]
    assert store.num_keys() == 39 and all(part.num_keys() > 3 for part in parts) and store.status()
    store.clear()
    assert store.num_keys() == 0
    with pytest.raises(ValueError, match="stores"):
        ClusterStore([])


def test_groups_of_neighbours() -> None:
    from bagua.torch_api.contrib.fuse.optimizer import calculate_mutual_groups

    pieces = torch.rand(100).split(10)
    first = [pieces[3], pieces[1], pieces[2], pieces[0], pieces[8], pieces[9], torch.rand(10)]
    alone = [torch.rand(10) for _ in first]
    assert calculate_mutual_groups([first, alone]) == []
    assert calculate_mutual_groups([first, [*first[:4], *alone[4:]]]) == [[3, 1, 2, 0]]
    assert calculate_mutual_groups([first, [alone[0], *first[1:]]]) == [[4, 5]]
    assert calculate_mutual_groups([first, list(first)]) == [[3, 1, 2, 0], [4, 5]]
    with pytest.raises(ValueError, match="7, 6"):
        calculate_mutual_groups([first, first[1:]])


def test_samplers_show_their_chunks() -> None:
    from bagua.torch_api.contrib import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

    samplers = [
        LoadBalancingDistributedSampler(range(10), lambda n: n, num_replicas=2, rank=rank, seed=3) for rank in range(2)
    ]
    chunks, order = samplers[0].shuffle_chunks()
    assert all(list(sampler) == [chunks[at][rank] for at in order] for rank, sampler in enumerate(samplers))
    assert (chunks, order) == samplers[1].shuffle_chunks()
    batches = LoadBalancingDistributedBatchSampler(samplers[0], lambda samples: [samples[:2], samples[2:]])
    batches.generate_batches()
    assert [sample for batch in batches for sample in batch] == list(samplers[0])


def test_the_store_of_a_loader() -> None:
    from bagua.torch_api.contrib import CachedDataset, CacheLoader

    loader = CacheLoader(backend="memory", dataset_name="the store of a loader")
    dataset = CachedDataset(["a", "b", "c"], backend="memory", dataset_name="another")
    assert loader.get("key", lambda _: 5) == 5 and dataset[1] == "b"
    dataset.flush()
    loader.flush()
    store: Any = vars(dataset)["cache_loader"].store
    assert isinstance(dataset.cache_loader.num_keys(), int) and store.num_keys() == dataset.cache_loader.num_keys() > 0
    assert store.status()
    store.clear()
    assert store.num_keys() == 0
    for each in (store, loader.store):
        each.shutdown()


def test_the_step_of_a_fused_optimizer_as_a_function() -> None:
    from bagua.torch_api.contrib.fuse.optimizer import fuse_optimizer, fuse_step

    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with pytest.raises(ValueError, match="fuse_optimizer"):
        fuse_step(optimizer)
    weight.grad = torch.ones(3)
    assert fuse_step(fuse_optimizer(optimizer), lambda: 7.0) == 7.0
    assert torch.equal(weight.detach(), torch.full((3,), 0.5))


def test_names_of_lightning() -> None:
    pytest.importorskip("lightning")
    from lightning_bagua.environment import BaguaEnvironment
    from lightning_bagua.strategy import LightningBaguaModule

    with pytest.raises(NotImplementedError, match="LightningBaguaModule"):
        LightningBaguaModule(nn.Linear(1, 1))
    assert BaguaEnvironment().creates_processes_externally


def test_the_environment_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    from lightning_bagua.environment import BaguaEnvironment

    values = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "2345", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    monkeypatch.delenv("GROUP_RANK", raising=False)
    for name, value in {**values, "NODE_RANK": "1", "BAGUA_SERVICE_PORT": "99"}.items():
        monkeypatch.setenv(name, value)
    found = BaguaEnvironment()
    assert BaguaEnvironment.detect() and found.service_port == 99
    assert (found.main_address, found.main_port, found.world_size()) == ("10.0.0.1", 2345, 4)
    assert (found.global_rank(), found.local_rank(), found.node_rank()) == (3, 1, 1)

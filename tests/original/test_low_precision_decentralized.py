"""Replicas of neighbours are equal on both sides; weights are those of a NumPy simulation of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.facade.old_style import RingOfDifferences
from tests.original.training import WRAPPERS, flat, loss_of, make_model, put, train, wrap
from tests.rank_pool import RankPool

STEPS, LR, SIZE = 6, 0.01, 3


def _through_8_bits(x: np.ndarray) -> np.ndarray:
    """Min-max quantisation of the original in fp32, with the lowest code kept at 0."""
    low, high = x.min(), x.max()
    scale = np.float32(255.0) / (high - low + np.float32(1e-7))
    upper = np.rint(high * scale)
    lower = upper - np.float32(255.0)
    codes = np.clip(np.minimum(np.rint(x * scale), upper) - lower, 0, 255).astype(np.uint8)
    return (codes.astype(np.float32) + lower) / scale


def _simulated(interval: int) -> list[torch.Tensor]:
    models = [make_model(0) for _ in range(SIZE)]
    me = [flat(model).numpy() for model in models]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            train(model, torch.optim.SGD(model.parameters(), lr=LR), rank, [step])
        if step % interval == 0:
            third = np.float32(1 / 3)
            moved: list[np.ndarray] = []
            for rank, model in enumerate(models):
                left, right = me[(rank - 1) % SIZE], me[(rank + 1) % SIZE]
                moved.append(_through_8_bits(flat(model).numpy() - me[rank] + third * (left + right - 2 * me[rank])))
            me = [mine + change for mine, change in zip(me, moved, strict=True)]
            for model, mine in zip(models, me, strict=True):
                put(model, torch.from_numpy(mine))
    return [flat(model) for model in models]


def _ranks(wrapper: str, options: dict[str, Any]) -> list[float]:
    import bagua.torch_api as api

    rank = dist.get_rank()
    model = make_model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    algorithm = api.algorithms.decentralized.LowPrecisionDecentralizedAlgorithm(**options)
    train(wrap(wrapper, model, optimizer, algorithm), optimizer, rank, range(STEPS))
    return flat(model).tolist()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("interval", [1, 2])
def test_as_simulated(pool: RankPool, wrapper: str, interval: int) -> None:
    found = pool.run(SIZE, _ranks, wrapper, {"hierarchical": False, "communication_interval": interval})
    for weights, expected in zip(found, _simulated(interval), strict=True):
        assert torch.allclose(torch.tensor(weights), expected, atol=1e-5)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_on_one_node_all_are_equal(pool: RankPool, wrapper: str) -> None:
    found = pool.run(2, _ranks, wrapper, {"hierarchical": True})
    assert found[0] == found[1]


def _replicas() -> list[list[float]]:
    rank = dist.get_rank()
    model = make_model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model.with_bagua([optimizer], RingOfDifferences())
    train(model, optimizer, rank, range(STEPS))
    assert loss_of(model, STEPS, rank).isfinite()
    (bucket,) = model.bagua_buckets
    assert torch.equal(bucket._weight, flat(model))
    return [bucket._weight.tolist(), bucket._left.tolist(), bucket._right.tolist()]


def test_replicas_of_neighbours_are_equal(pool: RankPool) -> None:
    found = pool.run(SIZE, _replicas)
    for rank, (_, left, right) in enumerate(found):
        assert left == found[(rank - 1) % SIZE][0] and right == found[(rank + 1) % SIZE][0]

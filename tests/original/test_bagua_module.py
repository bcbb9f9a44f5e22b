"""Each algorithm trains, one after the other on the same module; asynchronous averaging is stopped and begun again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.original.training import WRAPPERS, flat, make_model, train, wrap
from tests.rank_pool import RankPool

NAMES = ("bytegrad", "decentralized", "gradient_allreduce", "qadam", "async", "low_precision_decentralized")


def _algorithm(name: str, model: Any) -> tuple[Any, torch.optim.Optimizer]:
    from bagua.torch_api.algorithms import Algorithm
    from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer

    if name == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), warmup_steps=4)
        return QAdamAlgorithm(optimizer, hierarchical=False), optimizer
    options: dict[str, Any] = {"sync_interval_ms": 5} if name == "async" else {}
    if name not in ("async", "gradient_allreduce"):
        options["hierarchical"] = False
    return Algorithm.init(name, **options), torch.optim.SGD(model.parameters(), lr=0.01)


def _switching(wrapper: str) -> list[list[float]]:
    rank = dist.get_rank()
    model, seen = make_model(rank), []
    for name in NAMES:
        algorithm, optimizer = _algorithm(name, model)
        wrapped = wrap(wrapper, model, optimizer, algorithm)
        if name == "async":
            wrapped.bagua_algorithm.resume(wrapped)
        train(wrapped, optimizer, rank, range(8))
        if name == "async":
            wrapped.bagua_algorithm.abort(wrapped)
        assert flat(model).isfinite().all()
        seen.append(flat(model).tolist())
    return seen


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_switching_through_all_algorithms(pool: RankPool, wrapper: str) -> None:
    first, second = pool.run(2, _switching, wrapper)
    for name, a, b in zip(NAMES, first, second, strict=True):
        if name != "async":  # whose replicas are equal where its last average was made after the last step
            assert (a == b) == (name in ("bytegrad", "gradient_allreduce", "qadam")), name


def _aborts(wrapper: str, warmup_steps: int) -> None:
    import bagua.torch_api as api

    rank = dist.get_rank()
    model = make_model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    algorithm = api.algorithms.async_model_average.AsyncModelAverageAlgorithm(
        sync_interval_ms=5, warmup_steps=warmup_steps
    )
    wrapped = wrap(wrapper, model, optimizer, algorithm)
    for _ in range(2):
        wrapped.bagua_algorithm.resume(wrapped)
        wrapped.bagua_algorithm.abort(wrapped)
        wrapped.bagua_algorithm.resume(wrapped)
        train(wrapped, optimizer, rank, range(30))
        wrapped.bagua_algorithm.abort(wrapped)
        wrapped.bagua_algorithm.abort(wrapped)
    assert flat(model).isfinite().all()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("warmup_steps", [0, 10])
def test_averaging_stops_and_begins_again(pool: RankPool, wrapper: str, warmup_steps: int) -> None:
    pool.run(2, _aborts, wrapper, warmup_steps)

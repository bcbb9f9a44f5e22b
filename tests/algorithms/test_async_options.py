"""Asynchronous model averaging: options, the simulator's refusal, and the facade."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
import bagua.engine.lanes.pool
from bagua.algorithms import AsyncModelAverage, Warmup
from tests.algorithms.async_run import PATIENCE_S, Drift
from tests.algorithms.quadratic import N
from tests.rank_pool import RankPool


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AsyncModelAverage(sync_interval_ms=-1), ("sync_interval_ms", "-1")),
        (lambda: AsyncModelAverage(sync_interval_ms=float("nan")), ("sync_interval_ms", "nan")),
        (lambda: AsyncModelAverage(sync_interval_ms="1"), ("sync_interval_ms", "'1'")),  # type: ignore[arg-type]
        (lambda: AsyncModelAverage(sync_interval_ms=True), ("sync_interval_ms", "True")),
        (lambda: AsyncModelAverage(warmup_steps=-1), ("warmup_steps", "-1")),
        (lambda: AsyncModelAverage(warmup_steps=1.5), ("warmup_steps", "1.5")),  # type: ignore[arg-type]
        (lambda: bagua.algorithms.get("async", peers="all"), ("peers", "sync_interval_ms")),
    ],
)
def test_bad_options(make: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("algorithm", ["async", AsyncModelAverage(warmup_steps=9), Warmup(9, "bytegrad", "async")])
def test_simulation_refuses(algorithm: Any) -> None:
    """At once, also where averaging would begin later."""
    with pytest.raises(ValueError, match="algorithm: AsyncModelAverage.*time.*'local_sgd'"):
        bagua.simulate(algorithm, ranks=2, model=Drift, loss=lambda model, rank, step: model(torch.zeros(N)), steps=1)


def facade() -> list[int]:
    import bagua.torch_api
    from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm
    from bagua.torch_api.data_parallel import DistributedDataParallel

    with pytest.raises(ValueError, match="peer_selection_mode"):
        AsyncModelAverageAlgorithm("shift_one")
    algorithm = bagua.torch_api.algorithms.Algorithm.init("async", sync_interval_ms=0, warmup_steps=2)
    assert algorithm.core == AsyncModelAverage(sync_interval_ms=0, warmup_steps=2, codec="identity")
    assert AsyncModelAverageAlgorithm().core == AsyncModelAverage(sync_interval_ms=500, codec="identity")
    counts = []
    for wrap in (False, True):
        model: Any = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        chosen = AsyncModelAverageAlgorithm(sync_interval_ms=0, warmup_steps=2)
        if wrap:
            model = DistributedDataParallel(model, optimizers=[optimizer], algorithm=chosen)
        else:
            model.with_bagua([optimizer], chosen)
        inner = model.module if wrap else model
        deadline = time.monotonic() + PATIENCE_S
        model.bagua_algorithm.resume(model)

        def train_rounds(goal: int, model: Any = model, optimizer: Any = optimizer, inner: Any = inner) -> None:
            while (series := bagua.stats(inner).extra.get("round_s")) is None or series.count < goal:
                assert time.monotonic() < deadline  # noqa: B023
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                time.sleep(0.001)

        train_rounds(2)
        model.bagua_algorithm.abort(model)
        counts.append(bagua.stats(inner).extra["round_s"].count)
        model.bagua_algorithm.resume(model)
        train_rounds(counts[-1] + 2)
        model.bagua_algorithm.abort(model)
        dist.barrier()
    return counts


def test_facade(pool: RankPool) -> None:
    first, second = pool.run(2, facade)
    assert len(first) == len(second) == 2

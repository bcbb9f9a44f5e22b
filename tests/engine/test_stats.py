"""What is reported is what happened."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import bagua
from bagua.exchanges import AllReduce
from tests.engine.training import Net, batch, distributed, train
from tests.rank_pool import RankPool


def linear() -> nn.Module:
    return nn.Linear(6, 4096, bias=False)


def count(algorithm: str, options: dict) -> bagua.Stats:
    model, optimizer = distributed(linear, algorithm, **options)
    empty = bagua.stats(model)
    assert empty.steps == 0 and empty.total.bytes_sent == 0 and empty.last.compression_ratio == 1.0
    train(model, optimizer, range(3))
    return bagua.stats(model)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_bytes_and_ratio(pool: RankPool, algorithm: str, size: int) -> None:
    n = 6 * 4096
    for stats in pool.run(size, count, algorithm, {}):
        expected = bagua.algorithms.get(algorithm).bytes_per_rank(n, size)
        assert stats.steps == 3 and stats.num_buckets == 1 and stats.bucket_bytes == (4 * n,)
        assert abs(stats.last.bytes_sent - expected) <= 1
        assert stats.total.bytes_sent == 3 * stats.last.bytes_sent
        assert stats.last.payload_bytes == 4 * n and stats.last.launches == 1
        assert (stats.last.comm_s > 0) == (stats.total.exposed_s > 0) == (stats.last.bits_per_s > 0) == (size > 1)
        want = {"gradient_allreduce": 1.0, "bytegrad": 4 / (1 + 8 / 1024)}[algorithm] if size > 1 else 1.0
        assert stats.last.compression_ratio == pytest.approx(want, rel=1e-3)
        assert stats.algorithm.startswith(
            {"gradient_allreduce": "GradientAllReduce", "bytegrad": "ByteGrad"}[algorithm]
        )


class Slow(AllReduce):
    """An all-reduce that takes 50 ms."""

    def run(self, x_N, state, groups, step) -> None:
        time.sleep(0.05)
        super().run(x_N, state, groups, step)


class Slowly(bagua.algorithms.GradientAllReduce):
    """Uses `Slow`."""

    exchange = Slow()  # pyright: ignore[reportAssignmentType]


class Delay(torch.autograd.Function):
    """Passes through; its backward takes 150 ms."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(0.15)
        return grad


class Overlapping(nn.Module):
    """One layer whose exchange can hide behind the rest of the backward pass, and one whose exchange cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.second(Delay.apply(self.first(x)))


def hidden() -> tuple[list[bagua.Stats], list[bagua.Stats]]:
    """Of the first step of 4 modules, and of 7 later steps."""
    algorithm: Any = Slowly()
    modules = [distributed(Overlapping, algorithm, bucket_bytes=1, num_lanes=1) for _ in range(4)]
    first: list[bagua.Stats] = []
    for model, optimizer in modules:
        train(model, optimizer, [0])
        first.append(bagua.stats(model))
    model, optimizer = modules[0]
    others: list[bagua.Stats] = []
    for step in range(1, 8):
        train(model, optimizer, [step])
        others.append(bagua.stats(model))
    return first, others


def test_hidden_communication_is_not_exposed(pool: RankPool) -> None:
    """Two exchanges of 50 ms: one hides behind 150 ms of compute. Both are exposed in the first step.

    The best of several steps: a rank that is late exposes what would be hidden, and hides what would be exposed.
    """
    for first, others in pool.run(2, hidden):
        assert all(stats.last.comm_s >= 0.1 for stats in (*first, *others))
        assert max(stats.last.exposed_s for stats in first) >= 0.09
        best = max(others, key=lambda stats: stats.last.comm_s - stats.last.exposed_s)
        assert best.last.exposed_s <= best.last.comm_s - 0.04


def names_in_the_profile() -> set[str]:
    model, optimizer = distributed(Net, "bytegrad", bucket_bytes=200)
    train(model, optimizer, range(2))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        train(model, optimizer, [2])
    return {event.key for event in trace.key_averages() if "bagua" in event.key}


def test_launches_show_in_the_profiler(pool: RankPool) -> None:
    for names in pool.run(2, names_in_the_profile):
        assert any(name.startswith("bagua::launch scatter_gather[minmax_uint8] step 2 bucket 0 (") for name in names), (
            names
        )
        assert len(names) > 1


def logs() -> tuple[list[str], tuple[str, ...]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore
    logging.getLogger("bagua").addHandler(handler)
    try:
        model, optimizer = distributed(algorithm="bytegrad", hierarchical=True)
        train(model, optimizer, range(2))
        return records, bagua.stats(model).notices
    finally:
        logging.getLogger("bagua").removeHandler(handler)


def test_an_option_that_cannot_act_is_reported_once_by_rank_0(pool: RankPool) -> None:
    first, second = pool.run(2, logs)
    assert [r for r in first[0] if "hierarchical" in r] == [f"WARNING: bytegrad: {first[1][0]}"]
    assert not second[0] and second[1] == first[1]
    assert "one node" in first[1][0]


def test_quiet_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    bagua.init_process_group()
    try:
        model, optimizer = distributed()
        model(batch(0, 0)).sum().backward()
        optimizer.step()
    finally:
        bagua.destroy_process_group()
    assert capfd.readouterr() == ("", "")
    assert not dist.is_initialized()

"""Mixed precision: an overflow on one rank is seen by all, and all skip the same step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
from tests.engine.training import Net, batch, distributed, equal, values
from tests.rank_pool import RankPool


def overflow(algorithm: str, options: dict) -> tuple[list[float], list[dict]]:
    """Rank 1 overflows in step 2; returns the scale and the weights after each step."""
    rank = dist.get_rank()
    model, optimizer = distributed(Net, algorithm, bucket_bytes=200, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    scales, weights = [], []
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch(rank, step)).float().square().mean()
        if step == 2 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append({name: value for name, value in values(model).items() if "norm" not in name})
    return scales, weights


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("gradient_allreduce", {}), ("bytegrad", {}), ("bytegrad", {"error_feedback": True})],
)
def test_overflow_on_one_rank_skips_the_step_on_all(pool: RankPool, algorithm: str, options: dict) -> None:
    (scales, weights), other = pool.run(2, overflow, algorithm, options)
    assert equal((scales, weights), other)
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0]
    assert equal(weights[1], weights[2]), "skipped"
    assert not equal(weights[2], weights[3])
    assert all(value.isfinite().all() for value in weights[-1].values())


class Casting(nn.Module):
    """fp16 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3).half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.half()).float()


def half_precision(algorithm: str) -> list[torch.Tensor]:
    model, _ = distributed(Casting, algorithm)
    found = []
    for step in range(2):
        model.zero_grad()
        model(batch(dist.get_rank(), step)).sum().backward()
        found.append(model.linear.weight.grad.clone())
    bagua.detach(model)
    return found


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_fp16_parameters(pool: RankPool, algorithm: str) -> None:
    first, second = pool.run(2, half_precision, algorithm)
    assert equal(first, second)
    for step, grad in enumerate(first):
        assert grad.dtype is torch.float16
        want = sum(batch(rank, step).half().float().sum(0) for rank in range(2)) / 2
        assert torch.allclose(grad[0].float(), want, atol=0.05)

"""Mixed precision: an overflow on one rank is seen by all, and all skip the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
from tests.engine.training import Net, batch, distributed, equal, seeded, values
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


def late_scaler(algorithm: Any, kind: str, refused: int) -> None:
    """Plain steps first, then a scaler; step `refused` fails, none if it is -1."""
    model = seeded(Net, 0)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizers = [torch.optim.SGD(params[:3], lr=0.05), torch.optim.SGD(params[3:], lr=0.05)]
    bagua.distribute(model, optimizers, algorithm)
    make = bagua.GradScaler if kind == "bagua" else torch.amp.GradScaler
    scaler = make("cpu", init_scale=1024.0, enabled=kind != "disabled")
    for step in range(5):
        model(batch(dist.get_rank(), step)).square().mean().backward()
        optimizers[0].step()
        if step < 3:
            optimizers[1].step()
        else:
            for param in params[3:]:
                param.grad.mul_(scaler.get_scale())
            scaler.scale(torch.ones(()))
            if refused == step:
                with pytest.raises(RuntimeError, match=r"use bagua\.GradScaler"):
                    scaler.step(optimizers[1])
                return
            scaler.step(optimizers[1])
            scaler.update()
        model.zero_grad()
    assert refused < 0


WARMUP = bagua.algorithms.Warmup(4, "gradient_allreduce", "local_sgd")


@pytest.mark.parametrize(
    ("algorithm", "kind", "refused"),
    [
        ("local_sgd", "torch", 3),
        ("decentralized", "torch", 3),
        (WARMUP, "torch", 3),  # not only at the switch
        ("local_sgd", "bagua", -1),
        ("local_sgd", "disabled", -1),
        ("gradient_allreduce", "torch", -1),
        ("async", "torch", -1),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_plain_scaler_is_refused_whenever_it_is_used(pool: RankPool, algorithm: Any, kind: str, refused: int) -> None:
    """Later than the first step, and for another optimizer than the first one."""
    pool.run(2, late_scaler, algorithm, kind, refused)

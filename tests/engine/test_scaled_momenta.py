"""Momenta are sent in units of the scaled loss: a gradient scaler changes nothing, whatever its scale is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import Algorithm, OneBitLamb, QAdam, ZeroOneAdam
from bagua.comm.team import Team
from tests.engine.training import seeded
from tests.rank_threads import run_teams

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def qadam(params: Any) -> torch.optim.Optimizer:
    return bagua.optim.QAdam(params, lr=0.01, warmup_steps=3)


def lamb(params: Any) -> torch.optim.Optimizer:
    return bagua.optim.OneBitLamb(params, lr=0.01, warmup_steps=3)


def zero_one(params: Any) -> torch.optim.Optimizer:
    return bagua.optim.ZeroOneAdam(params, lr=0.01, var_freeze_step=3, local_step_scaler=4, local_step_clipper=4)


def train(team: Team, algorithm: Algorithm, make: Make, scale: float, plain: bool) -> torch.Tensor:
    model = seeded(lambda: nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 4)), 0)
    optimizer = make(model.parameters())
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    kind = torch.amp.GradScaler if plain else bagua.GradScaler
    scaler = kind("cpu", init_scale=scale or 1.0, growth_interval=1000, enabled=scale > 0)
    for step in range(20):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + team.rank))
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    bagua.detach(model)
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize(
    ("algorithm", "make", "plain"),
    [
        (QAdam(codec="sign"), qadam, False),
        (QAdam(codec="eden"), qadam, True),
        (QAdam(), qadam, True),
        (OneBitLamb(codec="sign"), lamb, True),
        (ZeroOneAdam(), zero_one, False),
        (ZeroOneAdam(codec="eden"), zero_one, False),
    ],
)
def test_as_without_a_scaler(algorithm: Algorithm, make: Make, plain: bool) -> None:
    """Local steps exchange what has been added up, not gradients, and share the errors that are fed back."""
    want, found = (run_teams(2, train, algorithm, make, scale, plain) for scale in (0.0, 2.0**12))
    for with_scaler, without in zip(found, want, strict=True):
        assert torch.equal(with_scaler, without)

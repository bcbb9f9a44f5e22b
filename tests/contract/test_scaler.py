"""Gradient scalers with algorithms whose steps do not grow with the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.contrib import DeMo, Dion, SignSGD
from tests.rank_threads import teams


def make_step(algorithm: Any, scaler: torch.amp.GradScaler) -> float:
    """One step; returns how far the weights have moved."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, algorithm, process_group=teams(1)[0])
    before = model.weight.detach().clone()
    try:
        scaler.scale(model(torch.ones(1, 8)).square().sum()).backward()
        scaler.step(optimizer)
    finally:
        bagua.detach(model)
    return (model.weight.detach() - before).norm().item()


@pytest.mark.parametrize("algorithm", [SignSGD(), DeMo(), Dion()], ids=lambda each: each.name)
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, bagua.GradScaler])
def test_a_scaler_that_would_shorten_the_steps_is_refused(algorithm: Any, kind: Any) -> None:
    with pytest.raises(RuntimeError, match=rf"^'{algorithm.name}' makes steps whose size .* without one$"):
        make_step(algorithm, kind("cpu"))
    assert make_step(algorithm, kind("cpu", enabled=False)) > 0.01


def test_steps_that_grow_with_the_loss_take_one() -> None:
    plain = make_step("gradient_allreduce", torch.amp.GradScaler("cpu", enabled=False))
    assert make_step("gradient_allreduce", torch.amp.GradScaler("cpu")) == pytest.approx(plain, rel=1e-5)

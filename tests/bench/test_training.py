"""Optimizers that an accelerator would run cost what SGD does, and still count as theirs."""

from __future__ import annotations

import pytest
import torch

from bagua.bench.compute import Compute, EmulatedModel
from bagua.bench.models import get
from bagua.bench.training import LEARNING_RATE, make_optimizer
from bagua.optim import TwoStage


@pytest.mark.parametrize("kind", ["qadam", "one_bit_lamb", "zero_one_adam"])
def test_emulated_adams_do_the_arithmetic_of_sgd(kind: str) -> None:
    model = EmulatedModel(get("layers25m/10"), Compute(0.0))
    params = list(model.parameters())
    optimizer = make_optimizer(kind, model)
    assert isinstance(optimizer, TwoStage)
    for step in range(4):
        before = [param.detach().clone() for param in params]
        for index, param in enumerate(params):
            param.grad = torch.full_like(param, float(index + step + 1))
        optimizer.step()
        assert optimizer.num_steps == step + 1
        for index, (param, old) in enumerate(zip(params, before, strict=True)):
            assert torch.equal(param, old.add(torch.full_like(old, index + step + 1.0), alpha=-LEARNING_RATE))
    assert optimizer.compressing


def test_the_real_ones_are_others() -> None:
    model = EmulatedModel(get("layers25m/10"), Compute(0.0))
    param = next(iter(model.parameters()))
    optimizer = make_optimizer("qadam", model, emulated=False)
    before = param.detach().clone()
    param.grad = torch.full_like(param, 5.0)
    optimizer.step()
    assert not torch.equal(param, before - 5.0 * LEARNING_RATE)

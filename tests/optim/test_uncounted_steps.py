"""Steps of `ZeroOneAdam` that found no gradient and do not count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.optim.zero_one_adam import StepKind


def train(uncounted_before: int | None) -> tuple[torch.Tensor, Any]:
    """Ten steps; before one of them a step without gradients that does not count."""
    param = nn.Parameter(torch.ones(5))
    optimizer = bagua.optim.ZeroOneAdam(
        [param], lr=0.05, var_freeze_step=3, local_step_scaler=2, local_step_clipper=4, weight_decay=0.1,
        decoupled_weight_decay=True,
    )  # fmt: skip
    for step in range(10):
        if step == uncounted_before:
            param.grad = None
            optimizer.step()
            assert optimizer.num_steps == step + 1
            optimizer.uncount_step()
        assert optimizer.num_steps == step
        param.grad = torch.sin(torch.arange(5.0) + step)
        optimizer.step()
        if optimizer.kind(step + 1) is StepKind.MEET:
            mean = torch.empty(5)
            optimizer.mean_momenta([param], [mean])
            optimizer.meet([param], [mean])
    return param.detach().clone(), optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize("step", range(10))
def test_as_if_it_had_never_been_made(step: int) -> None:
    """At the beginning and in the middle of an interval of local steps too, where sums are kept."""
    weights, groups = train(None)
    same, same_groups = train(step)
    assert torch.equal(same, weights) and same_groups == groups


def test_no_step_to_take_back() -> None:
    optimizer = bagua.optim.ZeroOneAdam([nn.Parameter(torch.ones(2))], var_freeze_step=3)
    with pytest.raises(RuntimeError, match=r"^uncount_step: no step was made since the last call$"):
        optimizer.uncount_step()

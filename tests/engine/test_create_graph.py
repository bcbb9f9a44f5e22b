"""`backward(create_graph=True)`: gradients are the mean of all ranks, and can be differentiated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bagua
from bagua.comm.team import Team
from tests.engine.training import batch, equal, seeded
from tests.rank_threads import run_teams


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def penalised(team: Team | None, size: int, steps: int, bucket_bytes: int = 1 << 20) -> dict:
    """Steps with a penalty on the norm of the mean gradient; without a team: of all ranks' data, in one process."""
    model = seeded(make, 0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if team is not None:
        bagua.distribute(model, optimizer, process_group=team, bucket_bytes=bucket_bytes)
    for step in range(steps):
        optimizer.zero_grad()
        ranks = range(size) if team is None else [team.rank]
        x = torch.cat([batch(rank, step) for rank in ranks]).double()
        model(x).square().mean().backward(create_graph=True)
        grads = [param.grad for param in model.parameters()]
        assert all(grad is not None and grad.requires_grad for grad in grads)
        penalty = sum(grad.square().sum() for grad in grads if grad is not None)
        for param in model.parameters():
            param.grad = None
        penalty.backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_a_penalty_on_the_mean_gradient_is_that_of_one_process(bucket_bytes: int) -> None:
    want = penalised(None, 2, 4)
    found = run_teams(2, penalised, 2, 4, bucket_bytes)
    assert equal(found[0], found[1])
    for name, value in want.items():
        assert torch.allclose(found[0][name], value, rtol=1e-9, atol=1e-12)

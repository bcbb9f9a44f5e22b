"""A gradient of 1e20 in one step overflows one second moment of Adam. That element stops, and nothing else is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.codecs import available_backends, use_backend
from bagua.comm.team import Team
from tests.engine.training import seeded
from tests.rank_threads import run_teams

ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient_allreduce": ("gradient_allreduce", {}),
    "eden": ("gradient_allreduce", {"codec": "eden:bits=2"}),
    "local_sgd": ("local_sgd", {}),
    "local_sgd, scaled": ("local_sgd", {"mean_moments": False, "scale_second_moment": True}),
    "diloco": ("diloco", {}),
    "decentralized": ("decentralized", {}),
    "low_precision_decentralized": ("low_precision_decentralized", {}),
    "async": ("async", {"sync_interval_ms": 0, "warmup_steps": 0}),
}


def trained(team: Team, name: str, options: dict[str, Any], spike: float) -> tuple[torch.Tensor, float]:
    """Weights, and the last loss."""
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)), 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    bagua.distribute(model, optimizer, name, process_group=team, bucket_bytes=1000, **options)
    made = torch.Generator().manual_seed(team.rank)
    loss = torch.zeros(())
    for step in range(40):
        x = torch.randn(32, 8, generator=made)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        if step == 12:
            bias = model.get_parameter("2.bias")[0]
            loss = loss + (bias - bias.detach()) * spike
        loss.backward()
        optimizer.step()
    bagua.average_parameters(model)
    bagua.detach(model)
    return torch.cat([param.detach().flatten() for param in model.parameters()]), loss.item()


@pytest.mark.parametrize("spike", [1e20, 1e30])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_the_rest_of_the_model_trains_on(name: str, spike: float, backend: str) -> None:
    used = next((each for each in reversed(available_backends()) if each.startswith("native")), "torch")
    with use_backend(used if backend == "compiled" else "torch"):
        found = run_teams(2, trained, *ALGORITHMS[name], spike)
        calm = run_teams(2, trained, *ALGORITHMS[name], 0.0)
    for (weights, loss), (_, without) in zip(found, calm, strict=True):
        assert weights.isfinite().all()
        assert loss < without + 0.35

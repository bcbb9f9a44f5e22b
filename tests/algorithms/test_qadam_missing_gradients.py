"""QAdam and parameters, or elements, that have no gradient on some ranks, or in some steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import QAdam
from bagua.comm.team import Team
from tests.rank_threads import run_teams


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = [nn.Linear(4, 4) for _ in range(3)]
        self.parts = nn.ModuleList(self.linears)

    def forward(self, x: torch.Tensor, use: list[int]) -> torch.Tensor:
        return torch.stack([self.parts[index](x) for index in use]).square().sum()


def branches(team: Team, codec: str) -> list[torch.Tensor]:
    """Part 0 everywhere; part 1 on rank 0 only, from step 6 on; part 2 nowhere after step 1."""
    torch.manual_seed(0)
    model = Branches()
    own = bagua.optim.QAdam(model.parameters(), lr=0.01, warmup_steps=3)
    bagua.distribute(model, own, QAdam(codec=codec), process_group=team, bucket_bytes=100)
    unused = None
    for step in range(12):
        own.zero_grad()
        use = [0] + ([1] if step >= 6 and team.rank == 0 else []) + ([2] if step < 2 else [])
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step)), use).backward()
        own.step()
        if step == 2:
            unused = model.linears[2].weight.detach().clone()
    assert unused is not None and torch.equal(unused, model.linears[2].weight), "nobody used it: nobody moves it"
    assert own.state[model.linears[2].weight]["step"] == 2
    assert own.state[model.linears[1].weight]["step"] == 6, "late, on all ranks"
    weights = [p.detach().clone() for p in model.parameters()]
    bagua.detach(model)
    return weights


@pytest.mark.parametrize("codec", ["minmax_uint8", "sign"])
def test_unused_parameters(codec: str) -> None:
    results = run_teams(3, branches, codec)
    for weights in results:
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(weights, results[0], strict=True))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.rows[:4] * x).sum()


def table(team: Team) -> torch.Tensor:
    model = Table()
    own = bagua.optim.QAdam(model.parameters(), lr=0.01, warmup_steps=3)
    bagua.distribute(model, own, QAdam(codec="sign"), process_group=team)
    for step in range(30):
        own.zero_grad()
        model(torch.randn(4, 4, generator=torch.Generator().manual_seed(step))).backward()
        own.step()
    bagua.detach(model)
    return model.rows.detach().clone()


def test_a_late_gradient_does_not_throw_a_weight_away() -> None:
    """An element with a gradient of 1e-6 in the warm-up and 1 afterwards: without a floor under v it explodes."""
    far = {}
    for floor in (0.0, 0.01):
        weight = nn.Parameter(torch.zeros(64))
        own = bagua.optim.QAdam([weight], lr=0.1, warmup_steps=5, variance_floor=floor)
        for step in range(8):
            weight.grad = torch.ones(64)
            weight.grad[3] = 1e-6 if step < 5 else 1.0
            own.step()
        far[floor] = weight.detach()[3].abs().item()
    assert far[0.0] > 1e3
    assert far[0.01] < 5.0
    with pytest.raises(ValueError, match=r"variance_floor.*-1"):
        bagua.optim.QAdam([nn.Parameter(torch.zeros(1))], variance_floor=-1)


def test_elements_that_never_had_a_gradient_stay() -> None:
    """Rows of an embedding that do not occur: the sign codec has no zero, and v is 0 there."""
    for rows in run_teams(2, table):
        assert torch.equal(rows[4:], torch.ones(4, 4))
        assert rows.isfinite().all() and (rows[:4] != 1).all() and (rows - 1).abs().max() < 0.01 * 30 * 10

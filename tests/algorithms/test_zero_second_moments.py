"""Parameters whose gradients are zeros until the second moment is fixed: they never move, which is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.comm.team import Team
from tests.engine.training import seeded
from tests.rank_threads import run_teams

FIXED_AFTER = 6
MAKES: dict[str, Any] = {
    "qadam": lambda params: bagua.optim.QAdam(params, lr=0.01, warmup_steps=FIXED_AFTER),
    "one_bit_lamb": lambda params: bagua.optim.OneBitLamb(params, lr=0.01, warmup_steps=FIXED_AFTER),
    "zero_one_adam": lambda params: bagua.optim.ZeroOneAdam(params, lr=0.01, var_freeze_step=FIXED_AFTER),
}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.late = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor, weight: float | None) -> Tensor:
        """`weight` is that of the loss of the late head; None: it is not in the loss."""
        hidden = self.body(x)
        loss = self.main(hidden).square().mean()
        return loss if weight is None else loss + weight * self.late(hidden).square().mean()


def two_heads(team: Team, name: str, before: float | None, first: int) -> tuple[bool, list[str]]:
    """Whether the late head moved, and the notices about it."""
    model = seeded(Heads, 0)
    optimizer = MAKES[name](model.parameters())
    bagua.distribute(model, optimizer, name, process_group=team, bucket_bytes=64)
    late = model.get_parameter("late.weight")
    begun = late.detach().clone()
    for step in range(3 * FIXED_AFTER):
        optimizer.zero_grad()
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + team.rank))
        model(x, before if step < first else 1.0).backward()
        optimizer.step()
    return not torch.equal(begun, late), [each for each in bagua.stats(model).notices if "late" in each]


@pytest.mark.parametrize("name", MAKES)
def test_a_head_that_begins_after_the_warm_up_of_zeros(name: str) -> None:
    for moved, notices in run_teams(2, two_heads, name, 0.0, FIXED_AFTER + 2):
        assert not moved
        assert len(notices) == 1
        assert f"{name}: 2 parameters had no gradient but zeros" in notices[0]
        assert "late.bias, late.weight;" in notices[0]


@pytest.mark.parametrize(("before", "first"), [(None, FIXED_AFTER + 2), (0.0, FIXED_AFTER - 1), (1.0, 0)])
@pytest.mark.parametrize("name", MAKES)
def test_nothing_is_said_of_heads_that_learn(name: str, before: float | None, first: int) -> None:
    for moved, notices in run_teams(2, two_heads, name, before, first):
        assert moved and not notices

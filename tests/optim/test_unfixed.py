"""From an optimizer whose second moment was fixed to Adam: steps stay as long as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.comm.team import Team
from bagua.optim import OneBitLamb, QAdam, ZeroOneAdam, unfix_second_moments
from tests.engine.training import seeded
from tests.rank_threads import run_teams

STEPS = 600
MADE: dict[str, Any] = {
    "QAdam": lambda params: QAdam(params, lr=1e-3, warmup_steps=30),
    "ZeroOneAdam": lambda params: ZeroOneAdam(params, lr=1e-3, var_freeze_step=200),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        made = torch.Generator().manual_seed(step)
        x = torch.randn(16, 8, generator=made)
        loss = (model(x) - x[:, :2] - torch.randn(16, 2, generator=made)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)), 0)


def moved(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    before = flat(model)
    train(model, optimizer, STEPS, STEPS + 1)
    return (flat(model) - before).abs().median().item()


def followed(name: str) -> tuple[nn.Module, torch.optim.Optimizer, float]:
    """A module and an AdamW that go on from another optimizer's state, and how far that one's next step goes."""
    model = net()
    before = MADE[name](model.parameters())
    train(model, before, 0, STEPS)
    after = net()
    after.load_state_dict(copy.deepcopy(model.state_dict()))
    adamw = torch.optim.AdamW(after.parameters(), lr=1e-3, weight_decay=0.0)
    adamw.load_state_dict(copy.deepcopy(before.state_dict()))
    return after, adamw, moved(model, before)


@pytest.mark.parametrize("name", MADE)
def test_steps_stay_as_long_as_they_were(name: str) -> None:
    model, adamw, want = followed(name)
    twin, as_loaded = copied(model, adamw)
    assert moved(twin, as_loaded) > 1.5 * want, "it would not be needed"
    assert unfix_second_moments(adamw) == 4
    assert unfix_second_moments(adamw) == 0
    assert moved(model, adamw) == pytest.approx(want, rel=0.25)


def copied(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    twin = net()
    twin.load_state_dict(model.state_dict())
    made = torch.optim.AdamW(twin.parameters(), lr=1e-3, weight_decay=0.0)
    made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin, made


def test_distribute_does_it_and_says_so() -> None:
    def main(team: Team) -> tuple[float, tuple[str, ...]]:
        model, adamw, _ = followed("QAdam")
        bagua.distribute(model, adamw, "gradient_allreduce", process_group=team)
        notices = bagua.stats(model).notices
        size = moved(model, adamw)
        bagua.detach(model)
        return size, notices

    _, _, want = followed("QAdam")
    for size, (line,) in run_teams(2, main):
        assert size == pytest.approx(want, rel=0.25)
        assert "second moments of 4 parameters were fixed by the optimizer that saved them" in line


def test_other_states_are_left_as_they_are() -> None:
    model = net()
    for optimizer in (QAdam(model.parameters(), warmup_steps=3), OneBitLamb(model.parameters(), warmup_steps=3)):
        train(model, optimizer, 0, 6)
        state = copy.deepcopy(optimizer.state_dict())
        assert unfix_second_moments(optimizer) == 0
        assert str(optimizer.state_dict()) == str(state)
    adam = torch.optim.Adam(model.parameters())
    assert unfix_second_moments(adam) == 0
    train(model, adam, 0, 2)
    assert unfix_second_moments(adam) == 0


def test_a_state_dict_is_refused() -> None:
    with pytest.raises(TypeError, match="optimizer: expected a torch.optim.Optimizer, got dict"):
        unfix_second_moments(torch.optim.Adam(net().parameters()).state_dict())  # pyright: ignore[reportArgumentType]


def test_what_was_infinite_is_zero() -> None:
    """OneBitLamb without `fixed_scaling` stores elements that never had a gradient as infinite."""
    model = nn.Linear(2, 1, bias=False)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    slot = {"step": 50, "num_updates": 10, "exp_avg": torch.zeros(1, 2), "exp_avg_sq": torch.tensor([[4.0, torch.inf]])}
    adam.load_state_dict({"state": {0: slot}, "param_groups": adam.state_dict()["param_groups"]})
    assert unfix_second_moments(adam) == 1
    (found,) = adam.state.values()
    want = 4.0 * (1 - 0.999**50) / (1 - 0.999**10)
    assert found["exp_avg_sq"][0, 0].item() == pytest.approx(want, rel=1e-5) and found["exp_avg_sq"][0, 1] == 0
    assert "num_updates" not in found

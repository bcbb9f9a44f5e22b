"""Parameters whose gradients are only rounding errors stay near where they are, whatever codec the momenta have."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bagua
from bagua.comm.team import Team
from tests.rank_threads import run_teams

LR, EXACT, STEPS = 1e-3, 20, 60
Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class Normed(nn.Module):
    """The mean that a batch norm subtracts takes the bias before it along."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.rest = nn.Sequential(nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

    @property
    def noisy(self) -> Tensor:
        return self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x.flatten(0, 1)[:, :4]))


class Attention(nn.Module):
    """A bias of the keys adds the same to all scores of a query, and a softmax is the same then."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 2)

    @property
    def noisy(self) -> Tensor:
        return self.key.bias

    def forward(self, x: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.head(x + self.out(attended)).flatten(0, 1)


def zero_one_adam(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """All kinds of steps."""
    return bagua.optim.ZeroOneAdam(params, lr=LR, var_freeze_step=EXACT, local_step_scaler=10)


def qadam(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return bagua.optim.QAdam(params, lr=LR, warmup_steps=EXACT)


def one_bit_lamb(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return bagua.optim.OneBitLamb(params, lr=LR, warmup_steps=EXACT, fixed_scaling=True)


def farthest(team: Team, model_class: type[Normed | Attention], make: Make, codec: str) -> float:
    """How far an element of the noisy parameter went."""
    torch.manual_seed(0)
    model = model_class()
    begun, far = model.noisy.detach().clone(), 0.0
    optimizer = make(model.parameters())
    bagua.distribute(model, optimizer, make.__name__, codec=codec, process_group=team)
    for step in range(STEPS):
        x = torch.randn(16, 6, 16, generator=torch.Generator().manual_seed(2 * step + team.rank))
        optimizer.zero_grad()
        (model(x) - x.flatten(0, 1)[:, :2]).square().mean().backward()
        optimizer.step()
        far = max(far, (model.noisy - begun).abs().max().item())
    bagua.detach(model)
    return far


@pytest.mark.parametrize(
    ("model_class", "make", "codec"),
    [
        (Normed, zero_one_adam, "sign"),
        (Normed, qadam, "sign"),
        (Normed, one_bit_lamb, "sign"),
        (Attention, zero_one_adam, "sign"),
        (Attention, qadam, "eden"),
    ],
)
def test_noise_does_not_throw_a_parameter_away(model_class: type[Normed | Attention], make: Make, codec: str) -> None:
    far = run_teams(2, farthest, model_class, make, codec)[0]
    assert far < 2 * 10 * LR * (STEPS - EXACT), "ten learning rates a step, with what the corrections add"


def test_a_bound_changes_no_bit_of_ordinary_steps() -> None:
    """Nor does a second moment that still learns ever reach it."""
    weights = []
    for floor in (0.0, 0.01):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.zeros(64))
        own = bagua.optim.QAdam([weight], lr=LR, warmup_steps=5, variance_floor=floor)
        late = bagua.optim.ZeroOneAdam([other := nn.Parameter(torch.zeros(64))], lr=LR, variance_floor=floor)
        for _ in range(20):
            weight.grad = other.grad = torch.randn(64).sign()  # no element below the floor
            own.step()
            late.step()
        weights.append((weight.detach(), other.detach()))
    assert torch.equal(weights[0][0], weights[1][0]) and torch.equal(weights[0][1], weights[1][1])


@pytest.mark.parametrize("floor", [0.01, 1.0, 1e-4, 0.0])
def test_the_bound_of_a_step(floor: float) -> None:
    """The larger of 10 and 1 / sqrt(variance_floor), for a whole tensor without ordinary gradients until then."""
    weight = nn.Parameter(torch.zeros(8))
    own = bagua.optim.QAdam([weight], lr=LR, warmup_steps=5, variance_floor=floor)
    for step in range(6):
        weight.grad = torch.full_like(weight, 1e-9 if step < 5 else 1.0)
        before = weight.detach().clone()
        own.step()
    moved = (weight.detach() - before).abs() * (1 - 0.9**6) / LR  # pyright: ignore[reportPossiblyUnboundVariable]
    expected = 0.1 / 1.1e-8 if floor == 0 else max(10.0, floor**-0.5)
    torch.testing.assert_close(moved, torch.full((8,), expected), rtol=0.01, atol=0.0)

"""Gradients that a script throws away before an optimizer sees them leave nothing behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import ByteGrad, DiLoCo, LowPrecisionDecentralized, OneBitLamb, PowerSGD, QAdam
from bagua.comm.team import Team
from bagua.contrib import DeMo, SignSGD
from bagua.engine.reducer.unused_feedback import Withheld
from tests.engine.training import seeded
from tests.rank_threads import run_teams

GARBAGE = 1000.0


def train(team: Team, algorithm: Any, make: Any, garbage: bool, to_none: bool) -> torch.Tensor:
    """Weights after six steps; with passes between them whose gradients are thrown away."""
    model = seeded(lambda: nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 4)), 0)
    optimizer = make(model.parameters())
    bagua.distribute(model, optimizer, algorithm, process_group=team)

    def discard(seed: int, size: float) -> None:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed + team.rank))
        (model(x).square().mean() * size).backward()
        optimizer.zero_grad(set_to_none=to_none)

    try:
        discard(1, 0.0)  # it shows that there are such passes, and is not undone
        for step in range(6):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + 100 * team.rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
            for number in range(2 if garbage and step % 2 else int(garbage)):
                discard(1000 + 10 * step + number, GARBAGE)
    finally:
        bagua.detach(model)
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_copies_end_some_time_after_the_last_such_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient scaler skips one step in 2000: that must not cost a copy of all residuals before each pass."""
    monkeypatch.setattr("bagua.engine.discarded_passes._QUIET", 3)
    held: list[int] = []
    hold = Withheld.hold

    def record(self: Withheld, *args: Any) -> None:
        held[-1] += 1
        hold(self, *args)

    monkeypatch.setattr(Withheld, "hold", record)
    run_teams(1, _skip_sometimes, held)
    # A skipped step is known of in the pass after it. Before the first step there is a copy in any case.
    assert held == [1, 0, 0, 1, 1, 2, 1, 1, 0, 0, 0, 0, 1, 1]


def _skip_sometimes(team: Team, held: list[int]) -> None:
    model = seeded(lambda: nn.Linear(16, 8), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, ByteGrad(codec="int4"), process_group=team)
    for step in range(14):
        held.append(0)
        if step in (3, 5, 12):  # skipped, as by a gradient scaler
            model(torch.ones(4, 16)).square().mean().backward()
            optimizer.zero_grad()
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    bagua.detach(model)


def test_a_loaded_state_is_not_overwritten() -> None:
    """By copies of the state before it."""
    for once, again in run_teams(2, _go_back):
        assert torch.equal(once, again)


def _go_back(team: Team) -> list[torch.Tensor]:
    model = seeded(lambda: nn.Linear(16, 8), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, ByteGrad(codec="int4"), process_group=team)

    def run(steps: range) -> None:
        for step in steps:
            for seed, last in ((step, False), (100 + step, True)):
                optimizer.zero_grad()
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * seed + team.rank))
                (model(x).square().mean() * (1.0 if last else GARBAGE)).backward()
            optimizer.step()

    run(range(3))
    weights, state = copy.deepcopy(model.state_dict()), bagua.state_dict(model)
    found = []
    for _ in range(2):
        run(range(3, 6))
        found.append(model.weight.detach().clone())
        optimizer.zero_grad()
        model(torch.ones(4, 16)).square().mean().backward()  # thrown away
        optimizer.zero_grad()
        model.load_state_dict(weights)
        bagua.load_state_dict(model, state)
    bagua.detach(model)
    return found


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def qadam(params: Any) -> torch.optim.Optimizer:
    return bagua.optim.QAdam(params, lr=0.01, warmup_steps=2)


def lamb(params: Any) -> torch.optim.Optimizer:
    return bagua.optim.OneBitLamb(params, lr=0.01, warmup_steps=2)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(
    ("algorithm", "make"),
    [
        (ByteGrad(codec="int4"), sgd),
        (ByteGrad(codec="eden:bits=2"), sgd),
        (ByteGrad(codec="eden:bits=2"), adam),
        (PowerSGD(rank=1, min_compression=1.0), sgd),
        (SignSGD(), sgd),
        (DeMo(), sgd),
        (QAdam(codec="sign"), qadam),
        (OneBitLamb(codec="sign"), lamb),
        (LowPrecisionDecentralized(overlap=True), sgd),
        (DiLoCo(4, delay=2), sgd),
    ],
)
def test_as_if_there_had_been_no_such_pass(algorithm: Any, make: Any, to_none: bool) -> None:
    want, found = (run_teams(2, train, algorithm, make, garbage, to_none) for garbage in (False, True))
    for with_garbage, without in zip(found, want, strict=True):
        assert torch.equal(with_garbage, without)

"""Weights that change in place within a forward pass, or between the passes of a step, while an exchange is late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.comm.team import Team
from bagua.engine.hooks import attachments
from tests.algorithms.quadratic import Quadratic, flat, target
from tests.engine.training import seeded
from tests.rank_threads import run_teams

LR, RHO, LIMIT_S = 0.1, 0.05, 60.0
SGD = torch.optim.SGD


@contextmanager
def late_lane(model: nn.Module) -> Iterator[None]:
    """What is launched within runs after it."""
    go = threading.Event()

    def hold() -> None:
        go.wait(LIMIT_S)

    attachments[model].engine.dispatcher.submit(hold, "held")
    try:
        yield
    finally:
        go.set()


def sharpness_aware(team: Team, algorithm: Any) -> np.ndarray:
    """Weights after six steps of SAM, whose first pass is not synchronised."""
    model = Quadratic()
    optimizer = SGD(model.parameters(), lr=LR)
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    params: list[Tensor] = list(model.parameters())
    for step in range(6):
        t = torch.tensor(target(team.rank, step), dtype=torch.float32)
        with late_lane(model):
            with bagua.no_sync(model):
                model(t).backward()
            with torch.no_grad():
                before = [param.clone() for param in params]
                torch._foreach_add_(params, [param.grad for param in params], alpha=RHO)  # pyright: ignore
            optimizer.zero_grad()
        model(t).backward()
        with torch.no_grad():
            torch._foreach_copy_(params, before)
        optimizer.step()
        optimizer.zero_grad()
    found = flat(model).detach().double().numpy().copy()
    bagua.detach(model)
    return found


def test_gossip_averages_the_weights_before_sharpness_aware_steps() -> None:
    x = np.stack([flat(Quadratic()).detach().double().numpy()] * 2)
    for step in range(6):
        t = np.stack([target(rank, step) for rank in range(2)])
        x = x.mean(0) - LR * (x + RHO * (x - t) - t)
    for found, want in zip(run_teams(2, sharpness_aware, "decentralized"), x, strict=True):
        assert np.abs(found - want).max() < 1e-5


def table() -> nn.Module:
    """Its forward pass scales the rows that it reads down to a norm of 1, in place."""
    return nn.Sequential(nn.Embedding(12, 4, max_norm=1.0), nn.Linear(4, 1))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    rows = torch.randint(0, 12, (5,), generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(rows)[:, 0] - rows % 3).square().mean()


def bounded_rows(team: Team, algorithm: Any, late: bool) -> list[Tensor]:
    model = seeded(table, 0)
    optimizer = SGD(model.parameters(), lr=LR)
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    for step in range(6):
        with late_lane(model) if late else nullcontext():
            loss = loss_of(model, team.rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [param.detach().clone() for param in model.parameters()]
    bagua.detach(model)
    return found


@pytest.mark.parametrize("late", [False, True])
def test_gossip_averages_the_weights_before_a_pass_that_changes_them(late: bool) -> None:
    models = [seeded(table, 0) for _ in range(2)]
    for step in range(6):
        pairs = zip(*(model.parameters() for model in models), strict=True)
        means = [torch.stack([param.detach() for param in pair]).mean(0) for pair in pairs]
        for rank, model in enumerate(models):
            optimizer = SGD(model.parameters(), lr=LR)
            loss_of(model, rank, step).backward()
            with torch.no_grad():
                for param, mean in zip(model.parameters(), means, strict=True):
                    param.copy_(mean)
            optimizer.step()
            optimizer.zero_grad()
    for found, model in zip(run_teams(2, bounded_rows, "decentralized", late), models, strict=True):
        for param, want in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(param, want.detach())

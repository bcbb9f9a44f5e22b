"""Parameters of an optimizer that no distributed module holds: a warning, as each rank trains them alone."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import bagua
from bagua.comm.team import Team
from bagua.moe import mark_rank_local
from tests.rank_threads import run_teams

SGD = torch.optim.SGD
Loop = Callable[[Team], tuple[str, ...]]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> tuple[str, ...]:
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return bagua.stats(model).notices


def a_criterion(team: Team) -> tuple[str, ...]:
    model, criterion = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    bagua.distribute(model, optimizer, process_group=team)
    return train(model, optimizer)


def a_group_added_later(team: Team) -> tuple[str, ...]:
    """The module's weight and bias have an optimizer each."""
    model, temperature = nn.Linear(2, 2), nn.Parameter(torch.ones(()))
    first, second = SGD([model.weight], lr=0.1), SGD([model.bias], lr=0.1)
    bagua.distribute(model, [first, second], process_group=team)
    assert train(model, first) == ()
    second.add_param_group({"params": [temperature]})
    return train(model, second)


def two_modules(team: Team) -> tuple[str, ...]:
    """Told when the first one is distributed, the second one's would be strays."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = SGD([*first.parameters(), *second.parameters()], lr=0.1)
    bagua.distribute(first, optimizer, process_group=team)
    bagua.distribute(second, optimizer, process_group=team)
    both = nn.Sequential(first, second)
    for _ in range(2):
        both(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return (*bagua.stats(first).notices, *bagua.stats(second).notices)


def left_to_the_ranks(team: Team) -> tuple[str, ...]:
    """On purpose: marked, ignored, frozen."""
    model, marked, frozen = nn.Linear(2, 2), nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()), False)
    mark_rank_local(marked)
    setattr(model, "_bagua_params_and_buffers_to_ignore", ["bias"])  # noqa: B010
    optimizer = SGD([*model.parameters(), marked, frozen], lr=0.1)
    bagua.distribute(model, optimizer, process_group=team)
    return train(model, optimizer)


@pytest.mark.parametrize(
    ("loop", "what"),
    [
        (a_criterion, "optimizer number 0 (SGD) also trains 2 parameters (in its parameter group 0)"),
        (a_group_added_later, "optimizer number 1 (SGD) also trains 1 parameter (in its parameter group 1)"),
    ],
)
def test_strays_are_told_of_once(loop: Loop, what: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bagua"):
        for notices in run_teams(2, loop):
            assert len(notices) == 1 and what in notices[0] and "ModuleDict" in notices[0]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and what in warnings[0]


@pytest.mark.parametrize("loop", [two_modules, left_to_the_ranks])
def test_parameters_of_distributed_modules_are_no_strays(loop: Loop) -> None:
    assert run_teams(2, loop) == [(), ()]


def test_a_rank_alone_has_none() -> None:
    assert run_teams(1, a_criterion) == [()]

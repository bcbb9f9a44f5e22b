"""Gradients that a script sets by hand are not averaged: a warning says so."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import bagua
from bagua.comm.team import Team
from tests.engine.training import seeded
from tests.rank_threads import run_teams

TEXT = "the last 3 optimizer steps used gradients of no synchronised backward pass"
Gradients = Callable[[nn.Module, Tensor], None]


def by_functional_call(model: nn.Module, x: Tensor) -> None:
    """As per-sample gradients are computed."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    found = torch.func.grad(lambda params: functional_call(model, params, (x,)).square().mean())(params)
    for name, param in model.named_parameters():
        param.grad = found[name]


def by_autograd_grad(model: nn.Module, x: Tensor) -> None:
    """Without `backward`."""
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(model(x).square().mean(), params), strict=True):
        param.grad = grad


def by_local_passes(model: nn.Module, x: Tensor) -> None:
    """Passes within `no_sync`."""
    model.zero_grad()
    with bagua.no_sync(model):
        model(x).square().mean().backward()


def by_backward(model: nn.Module, x: Tensor) -> None:
    """As usual."""
    model.zero_grad()
    model(x).square().mean().backward()


def none_at_all(model: nn.Module, x: Tensor) -> None:
    """A part of the script that is not trained now."""
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


def steps(team: Team, algorithm: str, gradients: tuple[Gradients, ...], within: bool = False) -> list[int]:
    """How often it has been told after each step."""
    model = seeded(lambda: nn.Linear(3, 3), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    found = list[int]()
    for step, get in enumerate(gradients):
        x = torch.full((2, 3), 1.0 + team.rank + step)
        if within:
            with bagua.no_sync(model):
                get(model, x)
                optimizer.step()
        else:
            get(model, x)
            optimizer.step()
        found.append(sum(TEXT in each for each in bagua.stats(model).notices))
    bagua.detach(model)
    return found


@pytest.mark.parametrize(
    ("algorithm", "gradients"),
    [
        *(("gradient_allreduce", each) for each in (by_functional_call, by_autograd_grad, by_local_passes)),
        ("bytegrad", by_functional_call),
        ("decentralized", by_functional_call),
    ],
)
def test_the_third_step_in_a_row_warns(algorithm: str, gradients: Gradients, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bagua"):
        assert run_teams(2, steps, algorithm, (by_backward, *[gradients] * 5)) == [[0, 0, 0, 1, 1, 1]] * 2
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [TEXT in each for each in warnings] == [True], "one rank warns"


@pytest.mark.parametrize(
    ("algorithm", "gradients"),
    [
        ("gradient_allreduce", (by_autograd_grad, by_autograd_grad, by_backward) * 3),
        ("gradient_allreduce", (none_at_all,) * 5),
        ("local_sgd", (by_functional_call,) * 5),
        ("decentralized", (by_autograd_grad,) * 5),
    ],
    ids=["passes between", "zeros", "averages at the end of a step", "averages from a forward pass"],
)
def test_what_is_left_alone(algorithm: str, gradients: tuple[Gradients, ...]) -> None:
    assert not any(run_teams(2, steps, algorithm, gradients)[0])


def test_steps_within_no_sync_are_left_alone() -> None:
    assert not any(run_teams(2, steps, "gradient_allreduce", (by_local_passes,) * 5, True)[0])


def test_a_rank_alone_needs_no_averages() -> None:
    assert run_teams(1, steps, "gradient_allreduce", (by_autograd_grad,) * 5) == [[0] * 5]

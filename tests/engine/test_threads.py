"""A module that other threads call while one trains it, as actors, samplers and evaluations do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.comm.team import Team
from tests.engine.training import batch, seeded
from tests.rank_threads import run_teams

STEPS = 6


class Net(nn.Module):
    """`within` is called in the backward pass, between the gradients of the two layers."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.within: Callable[[], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        between = self.first(x)
        if between.requires_grad:
            between.register_hook(self._called)
        return self.last(between.tanh())

    def _called(self, _grad: Tensor) -> None:
        if self.within is not None:
            self.within()


def elsewhere(call: Callable[[], Any]) -> Any:
    """What `call` returns in another thread, or the exception that it raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="sampler", daemon=True)
    thread.start()
    thread.join(30)
    assert found, "the other thread hangs"
    return found[0]


def make() -> Net:
    model = seeded(Net, 0)
    assert isinstance(model, Net)
    return model


def sampled(model: Net, context: Callable[[], AbstractContextManager[Any]] = torch.no_grad) -> Any:
    """A forward pass in another thread."""

    def sample() -> None:
        with context():
            model(torch.ones(3, 6))

    return elsewhere(sample)


def train(team: Team, options: dict[str, Any], samples: Callable[[int], Sequence[str]]) -> tuple[list[Tensor], int]:
    """Steps of two optimizers, with samples of the ranks at the moments that `samples` tells."""
    model = make()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model.first, model.last)]
    moments = samples(team.rank)
    bagua.distribute(model, optimizers, process_group=team, **options)

    def sample(moment: str) -> None:
        if moment in moments:
            assert sampled(model) is None

    sample("before")
    model.within = lambda: sample("backward")
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(batch(team.rank, step)).square().mean()
        sample("forward")
        loss.backward()
        sample("gradients")
        optimizers[0].step()
        sample("step")
        optimizers[1].step()
    steps = bagua.stats(model).steps
    bagua.average_parameters(model)
    bagua.detach(model)
    return [param.detach() for param in model.parameters()], steps


ALGORITHMS = [
    {"algorithm": "gradient_allreduce", "bucket_bytes": 64},
    {"algorithm": "gradient_allreduce", "broadcast_buffers": True},
    {"algorithm": "bytegrad"},
    {"algorithm": "local_sgd", "communication_interval": 2},
    {"algorithm": "decentralized"},
    {"algorithm": "low_precision_decentralized"},
]


@pytest.mark.parametrize("options", ALGORITHMS, ids=lambda options: "-".join(map(str, options.values())))
def test_samples_in_another_thread_begin_and_end_nothing(options: dict[str, Any]) -> None:
    """One rank draws them, at each moment of a step."""
    moments = ("before", "forward", "backward", "gradients", "step")
    with_samples = run_teams(2, train, options, lambda rank: moments if rank == 1 else ())
    for (weights, steps), (expected, _) in zip(with_samples, run_teams(2, train, options, lambda _: ()), strict=True):
        assert steps == STEPS
        assert all(map(torch.equal, weights, expected))


def train_beside(team: Team, call: str) -> tuple[Any, str, bool]:
    """`call` in another thread within a backward pass of rank 1. What it raised; the training goes on."""
    model, plain = make(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, process_group=team)
    raised: Any = None

    def other() -> None:
        nonlocal raised
        if team.rank == 1 and raised is None:
            raised = sampled(model, nullcontext) if call == "forward" else elsewhere(optimizer.step)

    for step in range(STEPS):
        model.within = other if step == 2 else None
        optimizer.zero_grad()
        model(batch(team.rank, step)).square().mean().backward()
        optimizer.step()
    bagua.detach(model)
    stepper = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        stepper.zero_grad()
        torch.stack([plain(batch(rank, step)).square().mean() for rank in range(2)]).mean().backward()
        stepper.step()
    alike = all(map(torch.allclose, model.parameters(), plain.parameters()))
    return raised, threading.current_thread().name, alike


@pytest.mark.parametrize("call", ["forward", "step"])
def test_what_may_not_run_beside_a_backward_pass_names_both_threads(call: str) -> None:
    (_, _, first), (raised, name, second) = run_teams(2, train_beside, call)
    what = {"forward": "a forward pass with gradients", "step": "the end of a backward pass or a step"}[call]
    assert type(raised) is RuntimeError
    assert str(raised).startswith(f"{what} in thread 'sampler', while a backward pass of the same module runs in")
    assert f"thread {name!r}" in str(raised)
    assert first and second


def train_in_threads(team: Team, how: str) -> list[Tensor]:
    """`how`: "here", each step in a new thread, or the backward pass and the step in another thread than the rest."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, process_group=team, broadcast_buffers=True)

    def forward(step: int) -> Tensor:
        with torch.no_grad():
            model(torch.ones(3, 6))
        return model(batch(team.rank, step)).square().mean()

    def learn(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def both(step: int) -> None:
        learn(forward(step))

    for step in range(STEPS):
        if how == "here":
            both(step)
        elif how == "steps":
            assert elsewhere(lambda step=step: both(step)) is None
        else:
            loss = forward(step)
            assert elsewhere(lambda loss=loss: learn(loss)) is None
    bagua.detach(model)
    return [param.detach() for param in model.parameters()]


def test_training_may_move_to_another_thread() -> None:
    expected = run_teams(2, train_in_threads, "here")
    for how in ("steps", "learner"):
        for weights, here in zip(run_teams(2, train_in_threads, how), expected, strict=True):
            assert all(map(torch.equal, weights, here))


def break_off(team: Team) -> bool:
    """An exception ends the backward pass of a thread on all ranks; another thread goes on."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, process_group=team)

    def fail() -> None:
        raise ValueError("deliberate")

    for step in range(STEPS):
        model.within = fail if step == 2 else None
        loss = model(batch(team.rank, step)).square().mean()
        found = elsewhere(loss.backward)
        assert isinstance(found, ValueError if step == 2 else type(None))
        assert sampled(model) is None
        if step != 2:
            optimizer.step()
        optimizer.zero_grad()
    engine_steps = bagua.stats(model).steps
    bagua.detach(model)
    return engine_steps == STEPS - 1


def test_a_pass_that_breaks_off_in_another_thread_is_over() -> None:
    assert run_teams(2, break_off) == [True, True]

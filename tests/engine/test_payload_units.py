"""What error feedback keeps follows the loss scale: a scaler that changes it changes nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import ByteGrad, GradientAllReduce, OneBitLamb, PowerSGD, QAdam, ZeroOneAdam
from bagua.comm.team import Team
from tests.engine.training import seeded
from tests.rank_threads import run_teams

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Scaler = type[torch.amp.GradScaler]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def qadam(params: Any) -> torch.optim.Optimizer:
    return bagua.optim.QAdam(params, lr=0.01, warmup_steps=2)


def lamb(params: Any) -> torch.optim.Optimizer:
    return bagua.optim.OneBitLamb(params, lr=0.01, warmup_steps=2)


def zero_one(params: Any) -> torch.optim.Optimizer:
    return bagua.optim.ZeroOneAdam(params, lr=0.01, var_freeze_step=2, local_step_scaler=4, local_step_clipper=2)


FEEDBACK = [
    (ByteGrad(codec="int4"), sgd),
    (GradientAllReduce(codec="sign"), sgd),
    (ByteGrad(codec="top_k"), sgd),
    (PowerSGD(rank=1, min_compression=1.0), sgd),
]


class Loop:
    """Trains a small model; the batch depends on rank and step."""

    def __init__(self, team: Team, algorithm: Any, make: Make, kind: Scaler, scale: float) -> None:
        self.rank, self.model = team.rank, seeded(lambda: nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 4)), 0)
        self.optimizer = make(self.model.parameters())
        bagua.distribute(self.model, self.optimizer, algorithm, process_group=team)
        self.scaler = kind("cpu", init_scale=scale, growth_interval=1000)

    def step(self, step: int, new_scale: float | None = None, factor: float = 1.0) -> None:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + self.rank))
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        if factor != 1.0:
            loss = loss + [*self.model.parameters()][-1][0] * factor
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update(new_scale)

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scaler

    def weights(self) -> torch.Tensor:
        return torch.cat([param.detach().flatten() for param in self.model.parameters()])


def with_scales(team: Team, algorithm: Any, make: Make, kind: Scaler, scales: Sequence[float]) -> torch.Tensor:
    loop = Loop(team, algorithm, make, kind, scales[0])
    for step, scale in enumerate([*scales[1:], scales[-1]]):
        loop.step(step, scale)
    bagua.detach(loop.model)
    return loop.weights()


@pytest.mark.parametrize(
    ("algorithm", "make", "kind"),
    [
        *((algorithm, make, torch.amp.GradScaler) for algorithm, make in FEEDBACK),
        (QAdam(codec="sign"), qadam, torch.amp.GradScaler),
        (OneBitLamb(codec="sign"), lamb, torch.amp.GradScaler),
        (ZeroOneAdam(), zero_one, bagua.GradScaler),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_scale_that_changes_is_as_one_that_does_not(algorithm: Any, make: Make, kind: Scaler, size: int) -> None:
    changing = [2.0**power for power in (14, 14, 15, 15, 4, 4, 2, 6, 6, 7, 8, 8)]
    want, found = (run_teams(size, with_scales, algorithm, make, kind, each) for each in ([4.0] * 12, changing))
    for changed, constant in zip(found, want, strict=True):
        assert torch.equal(changed, constant)


def kept(team: Team, make: Make, scales: Sequence[float]) -> dict[str, float]:
    loop = Loop(team, ByteGrad(codec="eden:bits=2"), make, torch.amp.GradScaler, scales[0])
    for step, scale in enumerate([*scales[1:], scales[-1]]):
        loop.step(step, scale)
    (state,) = bagua.state_dict(loop.model)["states"]
    bagua.detach(loop.model)
    return {name: float(tensor.norm()) for name, tensor in state["tensors"].items()}


@pytest.mark.parametrize(("make", "names"), [(sgd, {"residual", "chunk_residual"}), (adam, {"magnitude"})])
def test_what_eden_keeps_has_the_size_of_the_gradients(make: Make, names: set[str]) -> None:
    """Its random signs are others at each scale."""
    constant, *_ = run_teams(3, kept, make, [4.0] * 8)
    changed, *_ = run_teams(3, kept, make, [2.0**12] * 5 + [4.0] * 3)
    assert changed.keys() == constant.keys() == names
    assert all(constant[name] / 2 < changed[name] < constant[name] * 2 for name in names)


def skipping(team: Team, algorithm: Any, make: Make, kind: Scaler, first: int, skips: int, halve: bool) -> torch.Tensor:
    """Steps `first` to `first` + `skips` overflow on one rank."""
    loop = Loop(team, algorithm, make, kind, 2.0**12)
    for step in range(first + skips + 6):
        overflows = first <= step < first + skips
        loop.step(step, None if halve else 2.0**12, 1e38 if overflows and team.rank == 0 else 1.0)
    bagua.detach(loop.model)
    assert loop.scaler.get_scale() == 2.0 ** (12 - skips if halve else 12)
    return loop.weights()


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, bagua.GradScaler])
@pytest.mark.parametrize(("algorithm", "make"), FEEDBACK)
def test_skipped_steps_that_halve_the_scale(algorithm: Any, make: Make, kind: Scaler) -> None:
    want, found = (run_teams(2, skipping, algorithm, make, kind, 3, 6, halve) for halve in (False, True))
    for halved, constant in zip(found, want, strict=True):
        assert torch.equal(halved, constant)


def without_the_first(team: Team, algorithm: Any, make: Make, kind: Scaler, skips: int, overflow: bool) -> torch.Tensor:
    loop = Loop(team, algorithm, make, kind, 2.0 ** (12 if overflow else 12 - skips))
    for step in range(0 if overflow else skips, skips + 6):
        loop.step(step, None, 1e38 if step < skips and team.rank == 0 else 1.0)
    bagua.detach(loop.model)
    return loop.weights()


@pytest.mark.parametrize("skips", [1, 6])
@pytest.mark.parametrize(("algorithm", "make"), FEEDBACK)
def test_a_scaler_that_begins_too_high_leaves_nothing_behind(algorithm: Any, make: Make, skips: int) -> None:
    """Its scale is not known before the first step that it makes."""
    kind = torch.amp.GradScaler
    want, found = (run_teams(2, without_the_first, algorithm, make, kind, skips, high) for high in (False, True))
    for high, fitting in zip(found, want, strict=True):
        assert torch.equal(high, fitting)


def resumed(team: Team, algorithm: Any, make: Make, saved_at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale changes after the last step before the state is saved, and twice later."""
    scales = {saved_at - 1: 2.0**6, saved_at + 1: 2.0**10, saved_at + 3: 2.0**4}
    loop, states = Loop(team, algorithm, make, torch.amp.GradScaler, 2.0**12), []
    for step in range(saved_at):
        loop.step(step, scales.get(step))
    for each in loop.parts:
        states.append(copy.deepcopy(each.state_dict()))
    own = bagua.state_dict(loop.model)
    for step in range(saved_at, saved_at + 5):
        loop.step(step, scales.get(step))
    bagua.detach(loop.model)
    again = Loop(team, algorithm, make, torch.amp.GradScaler, 2.0**12)
    for each, state in zip(again.parts, states, strict=True):
        each.load_state_dict(state)
    bagua.load_state_dict(again.model, own)
    for step in range(saved_at, saved_at + 5):
        again.step(step, scales.get(step))
    bagua.detach(again.model)
    return loop.weights(), again.weights()


@pytest.mark.parametrize(("algorithm", "make"), [*FEEDBACK, (QAdam(codec="sign"), qadam)])
def test_a_resumed_run_has_the_same_bits(algorithm: Any, make: Make) -> None:
    for uninterrupted, again in run_teams(2, resumed, algorithm, make, 5):
        assert torch.equal(uninterrupted, again)


def going_back(team: Team) -> list[torch.Tensor]:
    loop, found = Loop(team, ByteGrad(codec="int4"), sgd, torch.amp.GradScaler, 2.0**12), []
    for step in range(4):
        loop.step(step)
    states = [copy.deepcopy(each.state_dict()) for each in loop.parts]
    own = bagua.state_dict(loop.model)
    for _ in range(2):
        for step in range(4, 8):
            loop.step(step, 2.0**4)
        found.append(loop.weights())
        for each, state in zip(loop.parts, states, strict=True):
            each.load_state_dict(state)
        bagua.load_state_dict(loop.model, own)
    bagua.detach(loop.model)
    return found


def test_an_earlier_state_is_in_the_units_of_its_scale() -> None:
    for once, again in run_teams(2, going_back):
        assert torch.equal(once, again)


def after_a_resume(team: Team, skips: int, overflow: bool) -> torch.Tensor:
    """A resumed run whose next steps are skipped, or left out."""
    first = Loop(team, ByteGrad(codec="int4"), sgd, bagua.GradScaler, 2.0**12)
    for step in range(4):
        first.step(step)
    states, own = [copy.deepcopy(each.state_dict()) for each in first.parts], bagua.state_dict(first.model)
    bagua.detach(first.model)
    again = Loop(team, ByteGrad(codec="int4"), sgd, bagua.GradScaler, 2.0**12)
    for each, state in zip(again.parts, states, strict=True):
        each.load_state_dict(state)
    bagua.load_state_dict(again.model, own)
    for step in range(4, 4 + skips) if overflow else ():
        again.step(step, None, 1e38)
    for step in range(4 + skips, 8 + skips):
        again.step(step)
    bagua.detach(again.model)
    return again.weights()


def test_steps_that_are_skipped_right_after_a_resume() -> None:
    """`bagua.GradScaler` tells its scale in a step that it skips, too."""
    want, found = (run_teams(2, after_a_resume, 5, overflow) for overflow in (False, True))
    for skipped, left_out in zip(found, want, strict=True):
        assert torch.equal(skipped, left_out)


def saved_by_two(team: Team, path: Path) -> torch.Tensor:
    loop = Loop(team, ByteGrad(codec="int4"), sgd, torch.amp.GradScaler, 2.0**12)
    for step in range(4):
        loop.step(step, 2.0**6 if step == 3 else None)
    bagua.checkpoint.save(path, {"model": loop.model, "optimizer": loop.optimizer}, step=4, process_group=team)
    (state,) = bagua.state_dict(loop.model)["states"]
    bagua.detach(loop.model)
    return state["tensors"]["residual"]


def loaded_by_three(team: Team, path: Path, steps: int) -> tuple[float, torch.Tensor]:
    """After `steps` others at another scale."""
    loop = Loop(team, ByteGrad(codec="int4"), sgd, torch.amp.GradScaler, 2.0**8)
    for step in range(steps):
        loop.step(step)
    objects = {"model": loop.model, "optimizer": loop.optimizer}
    bagua.checkpoint.load(path, objects, process_group=team, rng=False)
    data = bagua.state_dict(loop.model)
    (state,) = data["states"]
    bagua.detach(loop.model)
    return data["loss_scale"], state["tensors"]["residual"]


@pytest.mark.parametrize(("steps", "scale"), [(0, 2.0**6), (2, 2.0**8)])
def test_another_number_of_ranks_gets_errors_and_their_scale(tmp_path: Path, steps: int, scale: float) -> None:
    one, other = run_teams(2, saved_by_two, tmp_path)
    want = (one + other) / 2 * (scale / 2.0**6)
    for found, residual in run_teams(3, loaded_by_three, tmp_path, steps):
        assert found == scale
        torch.testing.assert_close(residual, want, rtol=1e-6, atol=0)

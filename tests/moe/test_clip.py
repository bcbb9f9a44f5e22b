"""Clipping by one norm over shared parameters and the experts of all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.comm.team import Team
from bagua.moe import clip_grad_norm_
from tests.engine.training import equal
from tests.moe import nets
from tests.rank_threads import run_teams


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def clipped(team: Team, max_norm: float, norm_type: float, as_module: bool) -> dict[str, Any]:
    model = nets.Net(team, seed=team.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, process_group=team)
    nets.loss(model, team.rank, 0).backward()
    before = grads(model)
    given: Any = model if as_module else model.parameters()
    norm = clip_grad_norm_(given, max_norm, norm_type, process_group=team)
    found = {"norm": norm, "before": before, "after": grads(model)}
    bagua.detach(model)
    return found


@pytest.mark.parametrize(
    ("max_norm", "norm_type", "as_module"),
    [(0.1, 2.0, True), (0.1, 2.0, False), (0.1, 1.0, True), (0.01, math.inf, False), (1e9, 2.0, True)],
)
def test_the_norm_is_that_of_all_experts(max_norm: float, norm_type: float, as_module: bool) -> None:
    results = run_teams(3, clipped, max_norm, norm_type, as_module)
    everything = [grad for name, grad in results[0]["before"].items() if "bagua_experts" not in name]
    everything += [grad for r in results for name, grad in r["before"].items() if "bagua_experts" in name]
    flat = torch.cat([grad.flatten() for grad in everything])
    expected = torch.linalg.vector_norm(flat, norm_type)
    scale = min(1.0, max_norm / (expected.item() + 1e-6))
    for result in results:
        assert torch.equal(result["norm"], results[0]["norm"]) and result["norm"].dtype is torch.float32
        torch.testing.assert_close(result["norm"], expected)
        for name, grad in result["before"].items():
            torch.testing.assert_close(result["after"][name], grad * scale)


@pytest.mark.parametrize("ours", [True, False])
def test_replicas_stay_equal_where_torchs_clipping_lets_them_drift(ours: bool) -> None:
    def run(team: Team) -> dict[str, Tensor]:
        model = nets.Net(team, seed=team.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        bagua.distribute(model, optimizer, process_group=team)
        for step in range(4):
            optimizer.zero_grad()
            nets.loss(model, team.rank, step).backward()
            if ours:
                clip_grad_norm_(model, 0.05, process_group=team)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        shared = model.shared()
        bagua.detach(model)
        return shared

    first, second = run_teams(2, run)
    assert equal(first, second) is ours


def test_a_norm_that_is_not_finite_on_one_rank_is_an_error_on_all() -> None:
    def run(team: Team) -> bool:
        model = nets.Net(team, seed=0)
        weights = dict(model.named_parameters())
        weights["moe.bagua_moe.experts.bagua_experts.0.0.weight"].grad = torch.full((8, 6), float(team.rank))
        if team.rank == 1:
            weights["moe.bagua_moe.experts.bagua_experts.1.0.bias"].grad = torch.full((8,), math.inf)
        with pytest.raises(RuntimeError, match="over all ranks is inf"):
            clip_grad_norm_(model, 1.0, error_if_nonfinite=True, process_group=team)
        return math.isinf(clip_grad_norm_(model, 1.0, process_group=team).item())

    assert run_teams(2, run) == [True, True]


def test_without_a_process_group_it_is_torchs() -> None:
    model = nets.Net(None)
    nets.loss(model, 0, 0).backward()
    twin = nets.Net(None)
    nets.loss(twin, 0, 0).backward()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.01), expected)
    for name, grad in grads(twin).items():
        torch.testing.assert_close(grads(model)[name], grad)
    assert clip_grad_norm_(nn.Linear(2, 2), 1.0).item() == clip_grad_norm_([], 1.0).item() == 0.0


@pytest.mark.parametrize(
    ("options", "match"), [({"max_norm": -1.0}, "max_norm"), ({"max_norm": 1.0, "norm_type": 0.0}, "norm_type")]
)
def test_bad_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        clip_grad_norm_(nn.Linear(2, 2), **options)


def test_arguments_of_another_type() -> None:
    for options in ({"max_norm": "1"}, {"max_norm": 1.0, "norm_type": "inf"}):
        with pytest.raises(TypeError, match=f"{list(options)[-1]}: expected a number, got str"):
            clip_grad_norm_(nn.Linear(2, 2), **options)
    for wrong in (3, [torch.zeros(1), "weight"]):
        with pytest.raises(TypeError, match="parameters: expected a module or its parameters, got (int|str)"):
            clip_grad_norm_(wrong, 1.0)  # pyright: ignore[reportArgumentType]

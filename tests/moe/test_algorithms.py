"""Every algorithm leaves experts to their rank, and their optimizers step with the experts' own gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
import bagua.contrib  # registers its algorithms
from bagua.comm.team import Team
from bagua.engine.startup.rank_local import rank_local_names
from bagua.moe import mark_rank_local
from tests.engine.training import equal
from tests.moe import nets
from tests.rank_threads import run_teams

OPTIONS: dict[str, dict[str, Any]] = {
    "async": {"sync_interval_ms": 1, "warmup_steps": 2},
    "diloco": {"communication_interval": 2},
    "local_sgd": {"communication_interval": 2},
    "sparse_loco": {"communication_interval": 2},
}
STEPS = 7


def train(team: Team, algorithm: str) -> dict[str, Any]:
    model = nets.Net(team, seed=team.rank)
    optimizer = nets.optimizer(algorithm, model.parameters())
    own = [param for name, param in model.named_parameters() if "bagua_experts" in name]
    shadow = [nn.Parameter(param.detach().clone()) for param in own]
    alone = nets.optimizer(algorithm, shadow)
    before = model.experts()
    bagua.distribute(model, optimizer, algorithm, process_group=team, **OPTIONS.get(algorithm, {}))
    start, untouched = model.shared(), equal(model.experts(), before)
    for step in range(STEPS):
        optimizer.zero_grad()
        nets.loss(model, team.rank, step).backward()
        for twin, param in zip(shadow, own, strict=True):
            assert param.grad is not None
            twin.grad = param.grad.clone()
        optimizer.step()
        alone.step()
    bagua.average_parameters(model)
    same = all(torch.equal(twin, param) for twin, param in zip(shadow, own, strict=True))
    found = {"start": start, "untouched": untouched, "same": same, "experts": model.experts(), "shared": model.shared()}
    bagua.detach(model)
    return found | {"moved": not equal(model.experts(), before)}


@pytest.mark.parametrize("algorithm", [row.name for row in bagua.algorithms.available()])
def test_experts_stay_their_ranks_own(algorithm: str) -> None:
    first, second = run_teams(2, train, algorithm)
    for each in (first, second):
        assert each["untouched"] and each["moved"] and each["same"]
    assert equal(first["start"], second["start"])
    assert equal(first["shared"], second["shared"])
    for name, tensor in first["experts"].items():
        assert not torch.equal(tensor, second["experts"][name]), name


def test_a_switch_that_takes_means_leaves_experts_alone() -> None:
    """From weights to gradients the ranks take means of weights and of the optimizers' state."""

    def run(team: Team) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
        model = nets.Net(team, seed=team.rank)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        bagua.distribute(model, optimizer, "decentralized", process_group=team)
        for step in range(2):
            optimizer.zero_grad()
            nets.loss(model, team.rank, step).backward()
            optimizer.step()
        before = model.experts()
        bagua.distribute(model, optimizer, "gradient_allreduce", process_group=team)
        momenta = {
            name: optimizer.state[param]["exp_avg"].clone()
            for name, param in model.named_parameters()
            if param in optimizer.state
        }
        unmoved = equal(model.experts(), before)
        bagua.detach(model)
        return momenta, model.shared(), unmoved

    (left, shared, unmoved), (right, others, unmoved_too) = run_teams(2, run)
    assert unmoved and unmoved_too and equal(shared, others)
    for name, momentum in left.items():
        assert torch.equal(momentum, right[name]) is ("bagua_experts" not in name), name


def test_ranks_may_hold_other_marked_tensors() -> None:
    def run(team: Team) -> None:
        torch.manual_seed(0)
        model = nn.ModuleDict({"own": nn.Linear(2 + team.rank, 3), "shared": nn.Linear(4, 4)})
        if team.rank:
            model["more"] = mark(nn.BatchNorm1d(3))
        mark(model["own"])
        bagua.distribute(model, [], process_group=team, broadcast_buffers=True)
        model["shared"](torch.ones(1, 4)).sum().backward()
        bagua.detach(model)

    run_teams(2, run)


def mark(module: nn.Module) -> nn.Module:
    mark_rank_local(module)
    return module


def test_names_of_what_is_marked() -> None:
    class Own(nn.Linear):
        bagua_rank_local = True

    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": Own(2, 2), "c": nn.Sequential(nn.BatchNorm1d(2))})
    assert rank_local_names(model) == {"b.weight", "b.bias"}
    model["a"].weight.expert = True  # type: ignore[assignment]
    mark_rank_local(model["c"][0].running_mean)
    assert rank_local_names(model) == {"a.weight", "b.weight", "b.bias", "c.0.running_mean"}
    mark_rank_local(model["c"])
    assert {name for name in rank_local_names(model) if name[0] == "c"} == {
        f"c.0.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    model["d"] = nn.Linear(2, 2)
    model["d"].weight = model["b"].weight
    assert "d.weight" in rank_local_names(model)


def test_no_sync_accumulates_the_experts_gradient_too() -> None:
    def run(team: Team) -> float:
        model = nets.Net(team, seed=team.rank, drop_tokens=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        bagua.distribute(model, optimizer, process_group=team)
        own = [param for name, param in model.named_parameters() if "bagua_experts" in name]
        total = [torch.zeros_like(param) for param in own]
        for step in range(2):
            optimizer.zero_grad()
            nets.loss(model, team.rank, step).backward()
            optimizer.step()
            total = [each + param.grad for each, param in zip(total, own, strict=True)]
        optimizer.zero_grad()
        with bagua.no_sync(model):
            nets.loss(model, team.rank, 0).backward()
        nets.loss(model, team.rank, 1).backward()
        optimizer.step()
        bagua.detach(model)
        return max((param.grad - each).abs().max().item() for param, each in zip(own, total, strict=True))

    assert max(run_teams(2, run)) < 1e-6


def test_a_plain_scaler_is_refused_and_ours_skips_on_all_ranks() -> None:
    """An expert's gradient may overflow on one rank alone; had it alone skipped, replicas would drift apart."""

    def run(team: Team) -> tuple[bool, bool]:
        model = nets.Net(team, seed=team.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(model, optimizer, process_group=team)
        plain = torch.amp.GradScaler("cpu", init_scale=4.0)
        plain.scale(nets.loss(model, team.rank, 0)).backward()
        with pytest.raises(RuntimeError, match="use bagua.GradScaler"):
            plain.step(optimizer)
        optimizer.zero_grad()
        ours = bagua.GradScaler("cpu", init_scale=4.0)
        before = model.shared()
        ours.scale(nets.loss(model, team.rank, 0)).backward()
        if team.rank == 1:
            next(p for n, p in model.named_parameters() if "bagua_experts" in n).grad.fill_(float("inf"))
        ours.step(optimizer)
        ours.update()
        skipped = equal(model.shared(), before)
        optimizer.zero_grad()
        ours.scale(nets.loss(model, team.rank, 1)).backward()
        ours.step(optimizer)
        return skipped, not equal(model.shared(), before)

    assert run_teams(2, run) == [(True, True)] * 2

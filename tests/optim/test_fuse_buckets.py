"""A fused optimizer leaves parameters and gradients in the engine's buckets, those of one parameter too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms import AsyncModelAverage, DiLoCo, LocalSGD, SparseLoCo, Warmup
from bagua.comm.team import Team
from bagua.engine.distributed_module import attached_buckets
from bagua.held import hold, is_held
from bagua.optim.fused.stepper import Stepper
from tests.rank_threads import run_teams

WEIGHTS: list[Any] = [
    "decentralized",
    "low_precision_decentralized",
    LocalSGD(communication_interval=2),
    DiLoCo(communication_interval=2),
    SparseLoCo(communication_interval=2),
    AsyncModelAverage(sync_interval_ms=0),
    Warmup(2, "gradient_allreduce", LocalSGD(communication_interval=2)),
]
EACH_ALONE = 8  # bytes of a bucket: each parameter has one to itself
Net = Callable[[], nn.Module]


class Layers(nn.Module):
    """Small layers, one with shared weights and one that is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 6)
        self.again = nn.Linear(10, 10)
        self.again.weight = self.inner.weight
        self.rare = nn.Linear(6, 6)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = self.rare(x) if self.steps % 3 == 2 else x
        return self.last(torch.tanh(self.again(self.inner(self.first(x)))))


class OfTwoTypes(nn.Module):
    """One double among floats has a bucket to itself, beside frozen doubles that lie in none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 10), nn.Linear(10, 10).double(), nn.Linear(10, 6)
        self.inner.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x).double()).float())


class Prompt(nn.Module):
    """One trainable parameter in front of a frozen model, all of them the optimizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)).requires_grad_(False)
        self.prompt = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x + self.prompt)


class LargeBetween(nn.Module):
    """Small parameters between ones that fill buckets of their own."""

    def __init__(self) -> None:
        super().__init__()
        large = [nn.Linear(inputs, outputs, bias=False) for inputs, outputs in ((50, 40), (40, 40), (40, 50))]
        self.layers = nn.Sequential(nn.Linear(6, 50), *large[:2], nn.LayerNorm(40), large[2], nn.Linear(50, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def name_of(value: Any) -> str:
    if isinstance(value, dict):
        return "small buckets" if value else "default"
    return value if isinstance(value, str) else getattr(value, "name", None) or value.__name__


def made(net: Net, fused: bool, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Equal on all ranks, which are threads that share the global generator."""
    model, generator = net(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, bagua.optim.fuse(optimizer) if fused else optimizer


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Sequence[int]) -> None:
    """Train, and see after each step that what the buckets hold still lies in them. Gradients are kept or not."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        before = holding(model)
        optimizer.step()
        for bucket in before if attached(model)[:1] == before[:1] else []:  # the step may end a warm-up
            places = [param.data_ptr() for param in bucket.params]
            assert places == [view.data_ptr() for view in bucket.views], bucket.describe()
        optimizer.zero_grad(set_to_none=step % 4 == 3)


def attached(model: nn.Module) -> list[Any]:
    """The buckets; none of a module that is not distributed."""
    try:
        return attached_buckets(model)
    except ValueError:
        return []


def holding(model: nn.Module) -> list[Any]:
    """The buckets that hold parameters."""
    return [bucket for bucket in attached(model) if bucket.params[0].data_ptr() == bucket.views[0].data_ptr()]


def result(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [slot["exp_avg"] for slot in optimizer.state.values()]
    return [each.detach().clone() for each in (*model.parameters(), *moments)]


def same(one: Sequence[Sequence[Tensor]], other: Sequence[Sequence[Tensor]]) -> bool:
    return all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(one, other, strict=True)
    )


def train(team: Team, net: Net, algorithm: Any, options: dict[str, Any], fused: bool) -> tuple[list[Tensor], list[int]]:
    """What it ends with, and the number of parameters in each bucket."""
    model, optimizer = made(net, fused)
    bagua.distribute(model, optimizer, algorithm, process_group=team, **options)
    advance(model, optimizer, team.rank, range(5))
    counts = [len(bucket.params) for bucket in holding(model)]
    bagua.detach(model)
    return result(model, optimizer), counts


CASES = [
    *((Layers, {"bucket_bytes": EACH_ALONE}, algorithm) for algorithm in WEIGHTS),
    *((net, {}, algorithm) for net in (OfTwoTypes, Prompt) for algorithm in WEIGHTS[:3]),
    *((LargeBetween, {"bucket_bytes": 1000}, algorithm) for algorithm in WEIGHTS[:3]),
]


@pytest.mark.parametrize(("net", "options", "algorithm"), CASES, ids=name_of)
def test_parameters_stay_in_their_buckets(net: Net, options: dict[str, Any], algorithm: Any) -> None:
    fused = run_teams(2, train, net, algorithm, options, True)
    assert any(count == 1 for _, counts in fused for count in counts)
    if not isinstance(algorithm, AsyncModelAverage):  # which averages at any time
        plain = run_teams(2, train, net, algorithm, options, False)
        assert same([got for got, _ in plain], [got for got, _ in fused])


def switches(team: Team, chain: Sequence[Any], fused: str) -> list[list[Tensor]]:
    """Alone at first, so that parameters have been moved together, then with one algorithm after the other, alone."""
    model, optimizer = made(Layers, fused == "before")
    found: list[list[Tensor]] = []
    advance(model, optimizer, 0, range(2))
    for number, (algorithm, bucket_bytes) in enumerate(chain):
        bagua.distribute(model, optimizer, algorithm, process_group=team, bucket_bytes=bucket_bytes)
        if fused == "after":
            bagua.optim.fuse(optimizer)
        advance(model, optimizer, team.rank, range(2 + 3 * number, 5 + 3 * number))
        found.append(result(model, optimizer))
    bagua.detach(model)
    advance(model, optimizer, team.rank, range(90, 92))
    return [*found, result(model, optimizer)]


@pytest.mark.parametrize("fused", ["before", "after"])
@pytest.mark.parametrize(
    "chain",
    [
        [("decentralized", EACH_ALONE), ("gradient_allreduce", EACH_ALONE), (LocalSGD(2), EACH_ALONE)],
        [("gradient_allreduce", 1 << 20), ("decentralized", EACH_ALONE), (LocalSGD(2), 500), ("bytegrad", 500)],
    ],
    ids=["weights first", "gradients first"],
)
def test_switches(chain: list[Any], fused: str) -> None:
    plain, other = run_teams(2, switches, chain, ""), run_teams(2, switches, chain, fused)
    assert all(same(one, two) for one, two in zip(plain, other, strict=True))


def resumes(team: Team, algorithm: Any, path: Path, fused: bool) -> tuple[list[Tensor], list[Tensor]]:
    """A training that goes on, and one that is loaded into other objects and does the same."""
    ends: list[list[Tensor]] = []
    for part in ("saved", "loaded"):
        model, optimizer = made(Layers, fused, seed=len(ends))
        bagua.distribute(model, optimizer, algorithm, process_group=team, bucket_bytes=EACH_ALONE)
        objects = {"model": model, "optimizer": optimizer}
        advance(model, optimizer, team.rank, range(4 if part == "saved" else 1))
        if part == "saved":
            bagua.checkpoint.save(path, objects, step=4, process_group=team)
        else:
            assert bagua.checkpoint.load(path, objects, process_group=team) is not None
            optimizer.zero_grad()
        model.steps = 4
        advance(model, optimizer, team.rank, range(4, 8))
        ends.append(result(model, optimizer))
        bagua.detach(model)
    return ends[0], ends[1]


@pytest.mark.parametrize("algorithm", ["decentralized", LocalSGD(communication_interval=3)], ids=name_of)
def test_resumed_trainings(algorithm: Any, tmp_path: Path) -> None:
    plain = run_teams(2, resumes, algorithm, tmp_path / "plain", False)
    fused = run_teams(2, resumes, algorithm, tmp_path / "fused", True)
    for (going_on, resumed), (other, other_resumed) in zip(plain, fused, strict=True):
        assert same([going_on] * 3, [resumed, other, other_resumed])


def gradients(team: Team) -> bool:
    """Whether gradients that are kept from step to step are the buckets' views after each step."""
    model, optimizer = made(Layers, fused=True)
    bagua.distribute(model, optimizer, process_group=team, bucket_bytes=EACH_ALONE)
    found = True
    for step in range(3):
        advance(model, optimizer, team.rank, [step])
        for bucket in attached(model):
            pairs = zip(bucket.params, bucket.views, strict=True)
            found &= all(param.grad is None or param.grad is view for param, view in pairs)
    bagua.detach(model)
    return found


def test_gradients_stay_in_their_buckets() -> None:
    assert run_teams(2, gradients) == [True, True]


def neighbours(team: Team) -> list[tuple[int, int]]:
    """For each bucket: its parameters, and the pieces in it that the optimizer sees."""
    model, optimizer = made(LargeBetween, fused=True)
    bagua.distribute(model, optimizer, "decentralized", process_group=team, bucket_bytes=1000)
    advance(model, optimizer, team.rank, range(2))
    stepper: Stepper = vars(optimizer)["_bagua_stepper"]
    pieces = [piece for arena in stepper.arenas for unit in arena.units for piece in unit.pieces]
    storages = [piece.untyped_storage().data_ptr() for piece in pieces]
    found = [(len(each.params), storages.count(each.flat.untyped_storage().data_ptr())) for each in holding(model)]
    bagua.detach(model)
    return found


def test_neighbours_in_a_bucket_are_stepped_as_one() -> None:
    for found in run_teams(2, neighbours):
        assert sorted(found)[0] == (1, 0) and sorted(found)[-1][0] > 1
        assert all(pieces == (1 if params > 1 else 0) for params, pieces in found)


def test_memory_is_held_while_the_flat_tensor_lives() -> None:
    flat, other = torch.zeros(6), torch.zeros(6)
    hold(flat)
    view, part = flat.view(2, 3), flat[2:4]
    assert is_held(flat) and is_held(view) and is_held(part) and is_held(nn.Parameter(view))
    assert not is_held(other) and not is_held(view.clone())
    again = flat[:]
    hold(again)
    assert is_held(view)
    del again, flat
    assert not is_held(view) and not is_held(part)
    hold(torch.zeros(0))
    assert not is_held(torch.zeros(0))

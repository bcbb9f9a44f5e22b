"""Buffers that are broadcast as `DistributedDataParallel` does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bagua
from bagua.comm.team import Team
from tests.engine.training import batch, seeded
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams


class Counting(nn.Module):
    """What the buffer holds tells after which passes it was another rank's."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.begun: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.begun.append(float(self.seen))
        self.seen.add_(float(x[0]))
        return self.linear(x)

    def act(self, x: Tensor) -> Tensor:
        """As a method that a script calls in place of the module."""
        return self.forward(x)


Context = Callable[[], AbstractContextManager[object]]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Context, passes: int, rank: int) -> None:
    """Steps of `passes` passes each; a pass without gradients and one without a step come among them."""
    for step in range(4):
        for number in range(passes):
            with no_sync() if number < passes - 1 else nullcontext():
                model(torch.tensor([10.0**rank, step])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                model(torch.tensor([10.0**rank, step]))
        if step == 2:
            with no_sync():
                model(torch.tensor([10.0**rank, step])).sum().backward()


def begun_with_ddp_and_bagua(passes: int) -> list[list[float]]:
    found = []
    for with_ddp in (True, False):
        model = Counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if with_ddp:
            wrapped = DistributedDataParallel(model)
            train(wrapped, optimizer, wrapped.no_sync, passes, dist.get_rank())
        else:
            bagua.distribute(model, optimizer, broadcast_buffers=True)
            train(model, optimizer, lambda model=model: bagua.no_sync(model), passes, dist.get_rank())
        found.append(model.begun)
    return found


@pytest.mark.process
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_passes_begin_with_the_buffers_of_ddp(pool: RankPool, passes: int) -> None:
    of_ranks = pool.run(2, begun_with_ddp_and_bagua, passes)
    for with_ddp, with_bagua in of_ranks:
        assert with_ddp == with_bagua
    assert of_ranks[0] != of_ranks[1], "no pass began with other buffers"


def accumulate_unlike() -> list[float]:
    """Rank 1 makes more passes within `no_sync`; and the loop with `join` ends there with such passes."""
    model, rank = Counting(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, broadcast_buffers=True)
    inputs = torch.tensor([10.0**rank, 0.0])

    def step(passes: int) -> None:
        with bagua.no_sync(model):
            for _ in range(passes):
                model(inputs).sum().backward()
        model(inputs).sum().backward()
        optimizer.step()

    for _ in range(3):
        step(2 * rank)
    with bagua.join(model):
        step(1)
        with bagua.no_sync(model):
            for _ in range(rank):
                model(inputs).sum().backward()
    model.begun.clear()
    step(0)
    bagua.detach(model)
    return model.begun


@pytest.mark.process
def test_ranks_with_more_passes_in_no_sync_broadcast_as_often(pool: RankPool) -> None:
    first, second = pool.run(2, accumulate_unlike)
    assert first == second


def call_another_method(team: Team) -> str:
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, broadcast_buffers=True, process_group=team)
    with pytest.raises(RuntimeError) as caught:
        model.act(torch.ones(2)).sum().backward()
    bagua.detach(model)
    return str(caught.value)


def test_the_error_of_a_pass_without_hooks_names_both_causes() -> None:
    for error in run_teams(2, call_another_method):
        assert "another method than forward()" in error and "torch.compile()" in error


def train_siamese(team: Team, algorithm: str, broadcast: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Two forward passes before each backward pass. Batch norm in training mode computes nothing with its buffers."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)), 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    bagua.distribute(model, optimizer, algorithm, broadcast_buffers=broadcast, process_group=team)
    for step in range(4):
        optimizer.zero_grad()
        first, second = model(batch(team.rank, 2 * step)), model(batch(team.rank, 2 * step + 1))
        (first - second).square().mean().backward()
        optimizer.step()
    bagua.detach(model)
    return dict(model.named_parameters()), model.get_buffer("1.running_mean")


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd", "decentralized"])
def test_several_forward_passes_before_a_backward_pass(algorithm: str) -> None:
    """The broadcast within the second one is no change that autograd counts, as under DDP."""
    with_broadcast, without = (run_teams(2, train_siamese, algorithm, broadcast) for broadcast in (True, False))
    for (weights, _), (expected, _) in zip(with_broadcast, without, strict=True):
        assert all(torch.equal(weights[name], param) for name, param in expected.items())
    assert not torch.equal(with_broadcast[1][1], without[1][1]), "nothing was broadcast"

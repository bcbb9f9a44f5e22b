"""Parameters without a gradient, in some steps, on some ranks, or never: nothing stalls, nothing diverges."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

import bagua
from tests.daily import one_in
from tests.engine.training import Branches, distributed, equal, values
from tests.rank_pool import RankPool


def follow(schedule: list[list[list[int]]], algorithm: str, bucket_bytes: int, zero: str) -> list[dict]:
    """Train along `schedule[step][rank]` = branches used; returns gradients of each step and the final weights."""
    rank = dist.get_rank()
    model, _ = distributed(Branches, algorithm, bucket_bytes=bucket_bytes)
    # Weight decay and momentum make a zero gradient differ from none.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    bagua.distribute(model, optimizer, algorithm, bucket_bytes=bucket_bytes)
    found = []
    for step, use in enumerate(schedule):
        if zero != "never":
            optimizer.zero_grad(set_to_none=zero == "none")
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x, use[rank]).backward()
        found.append(
            {
                index: None if branch.weight.grad is None else branch.weight.grad.clone()
                for index, branch in enumerate(model.branches)
            }
        )
        optimizer.step()
    found.append(values(model))
    return found


def mean_gradient(schedule: list, step: int, branch: int, size: int) -> torch.Tensor | None:
    """What the branch's weight gradient must be: d/dW sum(W x + b) = column sums of x, in each row."""
    total, used = torch.zeros(4, 4), False
    for rank in range(size):
        if branch in schedule[step][rank]:
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            total += x.sum(0).expand(4, 4)
            used = True
    return total / size if used else None


SCHEDULES = {
    "all use all": [[[0, 1, 2, 3]] * 3] * 3,
    "one never used": [[[0, 1, 3]] * 3] * 3,
    "different ranks, different branches": [[[0], [1], [2, 3]]] * 3,
    "one rank only": [[[0, 1, 2, 3], [0], [0]]] * 3,
    "first step learns little": [[[0]] * 3, [[0, 1, 2, 3]] * 3, [[3]] * 3],
    "changes at every step": [
        [[0, 1], [1], [1]],
        [[2], [2], [3]],
        [[3], [0, 1], [3]],
        [[0], [0], [0]],
        [[1, 2, 3]] * 3,
    ],
}


@pytest.mark.parametrize(("name", "bucket_bytes", "zero"), one_in(2, SCHEDULES, [1, 100, 1 << 20], ["none", "zeros"]))
def test_gradients_are_means_over_all_ranks(pool: RankPool, name: str, bucket_bytes: int, zero: str) -> None:
    schedule = SCHEDULES[name]
    results = pool.run(3, follow, schedule, "gradient_allreduce", bucket_bytes, zero)
    for rank, found in enumerate(results):
        for step in range(len(schedule)):
            for branch in range(4):
                want, have = mean_gradient(schedule, step, branch, 3), found[step][branch]
                if want is None and zero == "none":
                    assert have is None, f"rank {rank} step {step} branch {branch}: unused everywhere, has a gradient"
                elif want is None:
                    assert have is None or torch.equal(have, torch.zeros(4, 4))
                else:
                    assert have is not None and torch.allclose(have, want, atol=1e-6), (rank, step, branch)
        assert equal(found[-1], results[0][-1]), "weights differ between ranks"


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_stay_in_sync(pool: RankPool, algorithm: str, seed: int) -> None:
    """Sets that change all the time race the store's entries against the exchanges."""
    rng = random.Random(seed)
    size = rng.choice([2, 3, 4])
    schedule = [[rng.sample(range(4), rng.randint(1, 4)) for _ in range(size)] for _ in range(25)]
    results = pool.run(size, follow, schedule, algorithm, rng.choice([1, 100, 1 << 20]), "none")
    for found in results:
        for step in range(len(schedule)):
            assert [g is None for g in found[step].values()] == [
                not any(branch in use for use in schedule[step]) for branch in range(4)
            ]
        assert equal(found, results[0])


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_unused_everywhere_keeps_its_gradient_as_it_was(pool: RankPool, algorithm: str) -> None:
    schedule = [[[0, 1, 2, 3]] * 3, [[0]] * 3, [[0]] * 3]
    for found in pool.run(3, follow, schedule, algorithm, 1 << 20, "never"):
        for branch in (1, 2, 3):
            assert torch.equal(found[1][branch], found[0][branch])
            assert torch.equal(found[2][branch], found[0][branch])
        assert not torch.equal(found[1][0], found[0][0])


def accumulate_elsewhere() -> list[dict]:
    """Branch 1 is used within no_sync only; its gradient must be synchronised by the pass that follows."""
    rank = dist.get_rank()
    model, optimizer = distributed(Branches)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.full((2, 4), float(rank + 1))
        with bagua.no_sync(model):
            model(x, [1]).backward()
        model(x, [0]).backward()
        found.append(
            {i: None if b.weight.grad is None else b.weight.grad.clone() for i, b in enumerate(model.branches)}
        )
        optimizer.step()
    return [*found, values(model)]


def test_gradients_from_no_sync_alone_are_synchronised(pool: RankPool) -> None:
    results = pool.run(2, accumulate_elsewhere)
    for found in results:
        for step in range(3):
            for branch in (0, 1):
                assert torch.allclose(found[step][branch], torch.full((4, 4), 3.0)), "mean of 2 and 4"
            assert found[step][2] is None
        assert equal(found, results[0])


class Optional(torch.nn.Module):
    """Uses its parameters only if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, use: bool) -> dict[str, list[torch.Tensor]]:
        return {"out": [self.linear(x) if use else x * 2]}


def nothing_at_all(schedule: list[list[bool]]) -> list[torch.Tensor | None]:
    rank = dist.get_rank()
    model, optimizer = distributed(Optional)
    found = []
    for use in schedule:
        optimizer.zero_grad()
        x = torch.full((1, 4), float(rank + 1), requires_grad=True)
        model(x, use[rank])["out"][0].sum().backward()
        found.append(None if model.linear.weight.grad is None else model.linear.weight.grad.clone())
        optimizer.step()
    return found


def test_a_rank_that_uses_no_parameter_at_all(pool: RankPool) -> None:
    schedule = [[True, False], [False, True], [False, False], [True, True]]
    for found in pool.run(2, nothing_at_all, schedule):
        assert torch.equal(found[0], torch.full((4, 4), 0.5))
        assert torch.equal(found[1], torch.full((4, 4), 1.0))
        assert found[2] is None
        assert torch.equal(found[3], torch.full((4, 4), 1.5))


def checkpointed(reentrant: bool, steps: int) -> list[dict]:
    from torch.utils.checkpoint import checkpoint

    class Segments(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(4)])
            self.never = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=reentrant)
            return x

    model, optimizer = distributed(Segments, bucket_bytes=1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.full((1, 4), float(dist.get_rank() + step + 1), requires_grad=True)
        model(x).square().sum().backward()
        # Before the optimizer's hook gets a chance to mend anything.
        found.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    return found


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints(pool: RankPool, reentrant: bool) -> None:
    results = pool.run(2, checkpointed, reentrant, 3)
    assert equal(*results)
    for step in results[0]:
        assert step["never.weight"] is None and step["parts.0.weight"] is not None

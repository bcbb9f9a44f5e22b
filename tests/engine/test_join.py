"""`bagua.join`: what is left on a rank that had no further inputs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from tests.engine.training import Branches, batch, gradients, seeded, values
from tests.rank_pool import RankPool

LEAVES = ("none", "zeros", "mean", "accumulated")  # what a rank has in `.grad` when it leaves its loop


class Words(nn.Module):
    """An embedding with sparse gradients, which lie in no bucket, and a matrix and a bias, which do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6, sparse=True)
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.words((x * 10).long().abs() % 10).mean(1) + x)


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, leaves: str) -> dict[str, Tensor | None]:
    """Four batches on rank 0 and two on others; returns the gradients at the end of the loop."""
    rank = dist.get_rank()
    for step in range(2 if rank else 4):
        if leaves == "mean":
            optimizer.zero_grad()
        model(batch(rank, 10 * number + step)).square().mean().backward()
        optimizer.step()
        if leaves != "mean":
            optimizer.zero_grad(set_to_none=leaves != "zeros")
    if leaves == "accumulated":
        with bagua.no_sync(model):
            model(batch(rank, 100)).square().mean().backward()
    return gradients(model)


def dense(found: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: grad.to_dense() if grad is not None else None for name, grad in found.items()}


def joined(algorithm: str, as_view: bool, leaves: str, by_hand: bool) -> tuple[list, dict[str, Tensor]]:
    """Two epochs: the gradients before and after the end of each join, and the weights at the end."""
    model = seeded(Words, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    bagua.distribute(model, optimizer, algorithm, gradient_as_bucket_view=as_view)
    found = []
    for number in range(2):
        with bagua.join(model):
            before = epoch(model, optimizer, number, leaves)
        found.append((dense(before), dense(gradients(model))))
        for name, param in model.named_parameters() if by_hand else ():
            param.grad = before[name]
    bagua.detach(model)
    return found, values(model)


def joined_however(algorithm: str, as_view: bool) -> dict[str, list]:
    return {leaves: joined(algorithm, as_view, leaves, by_hand=False)[0] for leaves in LEAVES}


@pytest.mark.process
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "power_sgd"])
@pytest.mark.parametrize("as_view", [True, False])
def test_gradients_are_those_with_which_a_rank_left_its_loop(pool: RankPool, algorithm: str, as_view: bool) -> None:
    """So the next epoch adds to no gradient of passes in which this rank only took part."""
    for of_rank in pool.run(2, joined_however, algorithm, as_view):
        for leaves, found in of_rank.items():
            for before, after in found:
                assert before.keys() == after.keys()
                for name, grad in before.items():
                    left = after[name]
                    assert (grad is None) == (left is None), (leaves, name)
                    assert grad is None or torch.equal(grad, left), (leaves, name)


@pytest.mark.process
@pytest.mark.parametrize("leaves", ["none", "accumulated"])
def test_the_next_epoch_is_as_after_a_reset_by_hand(pool: RankPool, leaves: str) -> None:
    runs = [pool.run(2, joined, "gradient_allreduce", True, leaves, by_hand) for by_hand in (False, True)]
    for (_, weights), (_, others) in zip(*runs, strict=True):
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def accumulate_before_others_end() -> dict[str, Tensor]:
    """Rank 1 accumulates a gradient of branch 0, and leaves its loop; later no rank uses this branch."""
    model = seeded(Branches, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    bagua.distribute(model, optimizer)

    def step() -> None:
        model(torch.ones(2, 4), [1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    with bagua.join(model):
        step()
        if dist.get_rank() == 0:
            step()
        else:
            with bagua.no_sync(model):
                model(torch.ones(2, 4), [0]).backward()
    step()
    bagua.detach(model)
    return values(model)


@pytest.mark.process
def test_a_gradient_from_before_the_end_of_others_reaches_all_ranks(pool: RankPool) -> None:
    first, second = pool.run(2, accumulate_before_others_end)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    start = values(seeded(Branches, 0))
    assert not torch.equal(first["branches.0.weight"], start["branches.0.weight"])

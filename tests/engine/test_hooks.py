"""What a distributed module's hooks see and leave behind: leaf outputs, inference mode, passes without an exchange."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from bagua.comm.team import Team
from tests.engine.training import batch, distributed, equal, seeded, train, values
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams


class GivesLeaves(nn.Module):
    """Returns its own parameter and its input beside the result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), self.linear.weight, x


def leaf_outputs() -> tuple[int, int, int]:
    model, optimizer = distributed(GivesLeaves)
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(10):
        optimizer.zero_grad()
        y, weight, _ = model(x)
        (y.sum() + weight.square().sum()).backward()
        optimizer.step()
    leaves = (model.get_parameter("linear.weight"), x)
    of_weight, of_input = (len(leaf._backward_hooks or ()) for leaf in leaves)
    bagua.detach(model)
    return of_weight, of_input, sum(len(leaf._backward_hooks or ()) for leaf in leaves)


def test_outputs_that_are_leaves_keep_one_hook_and_lose_it_with_detach(pool: RankPool) -> None:
    assert pool.run(2, leaf_outputs) == [(1, 1, 0)] * 2


def inference_first(algorithm: str) -> tuple[dict, dict]:
    """Forward passes in inference mode, in training mode, before the first step and between steps."""
    outcomes = []
    for peek in (True, False):
        model, optimizer = distributed(_make, algorithm, seed_by_rank=False)
        for step in range(4):
            if peek:
                with torch.inference_mode():
                    model(batch(dist.get_rank(), 100 + step))
                    bagua.state_dict(model)
                    if step == 2:
                        bagua.average_parameters(model)
            elif step == 2:
                bagua.average_parameters(model)
            train(model, optimizer, [step])
        outcomes.append(values(model))
        bagua.detach(model)
    return outcomes[0], outcomes[1]


def _make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize(
    "algorithm", ["decentralized", "low_precision_decentralized", "local_sgd", "gradient_allreduce", "diloco"]
)
def test_forward_passes_in_inference_mode_change_nothing(pool: RankPool, algorithm: str) -> None:
    for peeked, plain in pool.run(2, inference_first, algorithm):
        assert equal(peeked, plain)


def sample_on_one_rank(team: Team, samples: bool, with_closure: bool) -> dict[str, Tensor]:
    """Forward passes without gradients, in training mode, on rank 0 alone: before each step and after the last."""
    model = seeded(_make, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.distribute(model, optimizer, "decentralized", process_group=team)

    def sample() -> None:
        if samples and team.rank == 0:
            with torch.no_grad():
                model(batch(0, 100))

    def evaluate(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch(team.rank, step)).square().mean()
        loss.backward()
        return loss

    for step in range(3):
        sample()
        if with_closure:
            optimizer.step(lambda step=step: float(evaluate(step).detach()))
        else:
            evaluate(step)
            sample()
            optimizer.step()
    sample()
    bagua.average_parameters(model)
    return values(model)


@pytest.mark.parametrize("with_closure", [False, True])
def test_forward_passes_without_gradients_exchange_nothing(with_closure: bool) -> None:
    peeked = run_teams(2, sample_on_one_rank, True, with_closure, timeout_s=20)
    assert equal(peeked, run_teams(2, sample_on_one_rank, False, with_closure))


def distribute_in_inference_mode() -> bool:
    model = _make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode():
        bagua.distribute(model, optimizer, "decentralized")
    train(model, optimizer, range(3))
    bagua.average_parameters(model)
    return not any(param.is_inference() for param in model.parameters())


def test_distribute_in_inference_mode(pool: RankPool) -> None:
    assert pool.run(2, distribute_in_inference_mode) == [True, True]


def accumulate(how: str, algorithm: str) -> tuple[dict, int]:
    model, optimizer = distributed(_make, algorithm, seed_by_rank=False)
    if how == "compiled":  # attributes of what torch.compile returns are kept by the module inside
        model = cast("nn.Module", torch.compile(bagua.detach(model), backend="eager"))
        bagua.distribute(model, optimizer, algorithm)
    rank = dist.get_rank()
    for step in range(3):
        optimizer.zero_grad()
        for part in range(4):
            x = batch(rank, 10 * step + part)
            if how != "no_sync":
                setattr(model, "require_backward_grad_sync", part == 3)  # noqa: B010 - nn.Module declares no bool
                model(x).square().mean().backward()
            elif part < 3:
                with bagua.no_sync(model):
                    model(x).square().mean().backward()
            else:
                model(x).square().mean().backward()
        optimizer.step()
    return values(model), bagua.stats(model).total.bytes_sent


@pytest.mark.parametrize(
    ("how", "algorithm"),
    [(how, each) for how in ("attribute", "compiled") for each in ("gradient_allreduce", "bytegrad", "local_sgd")],
)
def test_require_backward_grad_sync_is_honoured(pool: RankPool, how: str, algorithm: str) -> None:
    """The idiom of loops written for DistributedDataParallel: the same bits and bytes as with no_sync."""
    by_attribute, by_context = pool.run(2, accumulate, how, algorithm), pool.run(2, accumulate, "no_sync", algorithm)
    for (trained, sent), (expected, fewest) in zip(by_attribute, by_context, strict=True):
        assert equal(list(trained.values()), list(expected.values()))
        assert sent == fewest

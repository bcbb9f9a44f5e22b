"""Refused before anything changes: a parameter under two engines, sharded optimizers, wrappers without hooks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
from tests.engine.training import Net, batch, distributed, equal, gradients, seeded, train, values
from tests.rank_pool import RankPool


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)


class Tower(nn.Module):
    """A body that may be another module's too, and a head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh())


def shared(algorithm: str) -> list[str]:
    found = []
    left = seeded(lambda: Tower(nn.Linear(6, 5)), 0)
    right = Tower(left.body)
    for first, second in ((left, right), (left, left.body), (left.body, left)):
        bagua.distribute(first, sgd(first), algorithm)
        with pytest.raises(ValueError, match="already distributed") as caught:
            bagua.distribute(second, sgd(second), algorithm)
        found.append(str(caught.value))
        optimizer = sgd(first)
        bagua.distribute(first, optimizer, algorithm)  # the same module again is fine
        before = values(first)
        train(first, optimizer, range(2)) if isinstance(first, Tower) else None
        assert not isinstance(first, Tower) or not equal(before, values(first))
        bagua.detach(first)
        bagua.detach(bagua.distribute(second, sgd(second), algorithm))  # free again
    return found


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized"])
def test_a_parameter_under_two_engines(pool: RankPool, algorithm: str) -> None:
    """Both engines would exchange the one gradient, or move the one weight into buckets of theirs."""
    for twin, submodule, parent in pool.run(2, shared, algorithm):
        assert "parameter 'body.weight' of Tower is parameter 'body.weight' of another module (Tower)" in twin
        assert (
            "parameter 'weight' of Linear is parameter 'body.weight' of Tower, of which it is submodule 'body'"
            in submodule
        )
        assert "parameter 'body.weight' of Tower is parameter 'weight' of its own submodule 'body' (Linear)" in parent


def shared_on_one_rank() -> str:
    left = seeded(lambda: Tower(nn.Linear(6, 5)), 0)
    bagua.distribute(left, sgd(left))
    right = Tower(left.body if dist.get_rank() == 1 else nn.Linear(6, 5))
    with pytest.raises(ValueError) as caught:
        bagua.distribute(right, sgd(right))
    return str(caught.value)


def test_all_ranks_hear_of_it(pool: RankPool) -> None:
    first, second = pool.run(2, shared_on_one_rank)
    assert first.startswith("rank 1 cannot distribute its module: ValueError: module: parameter 'body.weight'")
    assert second in first


def shared_with_the_dropped() -> bool:
    """The other module is garbage within a cycle, or only shares what it has frozen."""
    gc.disable()
    try:
        left = seeded(lambda: Tower(nn.Linear(6, 5)), 0)
        left.cycle = [left]
        bagua.distribute(left, sgd(left))
        body = left.body
        del left
        right = Tower(body)
        bagua.distribute(right, sgd(right))
    finally:
        gc.enable()
    body.requires_grad_(False)
    third = Tower(body)
    optimizer = sgd(third)
    bagua.distribute(third, optimizer)
    train(third, optimizer, range(2))
    mean = third.head.weight.detach().clone()
    dist.all_reduce(mean)
    return torch.equal(mean / 2, third.head.weight)


def test_dropped_modules_and_frozen_parameters_do_not_count(pool: RankPool) -> None:
    assert pool.run(2, shared_with_the_dropped) == [True, True]


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: inherits, delegates, and never calls `Optimizer.__init__`."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def wrapped() -> tuple[int, dict, dict, str]:
    model, optimizer = distributed(algorithm="local_sgd", communication_interval=2)
    train(model, optimizer, range(4))
    other = seeded(Net, dist.get_rank())
    wrapper = Wrapper(Wrapper(torch.optim.SGD([p for p in other.parameters() if p.requires_grad], 0.05, momentum=0.9)))
    bagua.distribute(other, wrapper, "local_sgd", communication_interval=2)
    train(other, wrapper, range(4))
    third = seeded(Net, 0)
    with pytest.raises(TypeError) as caught:
        bagua.distribute(third, [sgd(third), Wrapper(None)])
    assert not third._forward_pre_hooks and not next(third.parameters())._post_accumulate_grad_hooks
    return bagua.stats(other).steps, values(model), values(other), str(caught.value)


def test_wrappers_without_hooks(pool: RankPool) -> None:
    """The optimizer within is followed; where there is none, nothing has changed."""
    for steps, direct, through, message in pool.run(2, wrapped):
        assert steps == 4 and equal(direct, through)
        assert message.startswith("optimizers: number 1 (Wrapper) has no step hooks")


def sharded(algorithm: Any) -> tuple[str, bool]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of a deprecation within torch

    model = seeded(Net, 0)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.05)
    with pytest.raises(ValueError) as caught:
        bagua.distribute(model, optimizer, algorithm)
    assert not model._forward_pre_hooks
    bagua.distribute(model, optimizer)
    model(batch(dist.get_rank(), 0)).sum().backward()
    mine = gradients(model)
    optimizer.step()
    whole = [None] * dist.get_world_size()
    dist.all_gather_object(whole, [values(model), mine])
    weights = [{name: value for name, value in each[0].items() if "norm.r" not in name} for each in whole]
    return str(caught.value), equal(weights[0], weights[1]) and equal(whole[0][1], whole[1][1])


@pytest.mark.parametrize(
    "algorithm", ["local_sgd", "async", bagua.algorithms.Warmup(3, "gradient_allreduce", "diloco")], ids=str
)
def test_a_sharded_optimizer_needs_mean_gradients(pool: RankPool, algorithm: Any) -> None:
    for message, same in pool.run(2, sharded, algorithm):
        assert same and message.startswith("optimizers: number 0 (ZeroRedundancyOptimizer)")

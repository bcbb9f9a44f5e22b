"""`bagua.contrib.signsgd` against the formula in numpy, and its gradients of zero and of infinity."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import Algorithm
from tests.algorithms.quadratic import Quadratic, flat, start, target
from tests.contract.members import CONTRIB_ALGORITHMS

STEPS, LR = 12, 0.05


def signsgd(**options: float) -> Algorithm:
    return CONTRIB_ALGORITHMS["signsgd"](**options)


def oracle(ranks: int, momentum: float) -> np.ndarray:
    x, m = start().astype(np.float32), np.zeros((ranks, start().size), np.float32)
    for step in range(STEPS):
        for rank in range(ranks):
            m[rank] = momentum * m[rank] + (1 - momentum) * (x - target(rank, step).astype(np.float32))
        toward = 1 if step % 2 == 0 else -1
        votes = np.where(m == 0, toward, np.sign(m)).sum(0)
        x = x - np.float32(LR) * np.where(votes == 0, toward, np.sign(votes)).astype(np.float32)
    return x


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_formula(ranks: int, momentum: float) -> None:
    run = bagua.simulate(
        signsgd(momentum=momentum),
        ranks=ranks,
        model=Quadratic,
        loss=lambda module, rank, step: module(torch.tensor(target(rank, step), dtype=torch.float32)),
        steps=STEPS,
        optimizer=lambda params: torch.optim.SGD(params, lr=LR),
    )
    for model in run.models:
        assert np.abs(flat(model).detach().numpy() - oracle(ranks, momentum)).max() < 1e-5
    assert run.bytes_sent == STEPS * signsgd().bytes_per_rank(start().size, ranks)


def train(gradient, steps: int) -> list[float]:
    """A weight of each step, of one whose gradient at (rank, step) is `gradient`."""
    seen: list[float] = []

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        if rank == 0:
            seen.append(module.weight.item())  # type: ignore[operator]
        return module.weight.sum() * gradient(rank, step)

    bagua.simulate(
        signsgd(),
        ranks=2,
        model=lambda: nn.Linear(1, 1, bias=False),
        loss=loss,
        steps=steps,
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
    )
    return seen


@pytest.mark.parametrize("gradient", [lambda rank, step: 0.0, lambda rank, step: (-1.0) ** rank], ids=["zero", "tie"])
def test_a_weight_without_a_majority_stays_where_it_is(gradient) -> None:
    seen = train(gradient, 9)
    assert max(abs(each - seen[0]) for each in seen) <= 1.001
    assert abs(seen[8] - seen[0]) < 1e-6 < abs(seen[7] - seen[0])


def test_an_overflow_of_one_rank_is_seen_once() -> None:
    seen = []

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        bad = float("inf") if (rank, step) == (1, 3) else 1.0
        return module.weight.sum() * bad  # type: ignore[operator]

    class Skips(torch.optim.SGD):
        """As a gradient scaler: no step with what is not finite."""

        def step(self, closure=None):
            grads = [p.grad for group in self.param_groups for p in group["params"]]
            seen.append(all(bool(grad.isfinite().all()) for grad in grads))
            return super().step(closure) if seen[-1] else None

    run = bagua.simulate(
        signsgd(),
        ranks=2,
        model=lambda: nn.Linear(3, 1, bias=False),
        loss=loss,
        steps=8,
        optimizer=lambda p: Skips(p, 1),
    )
    assert seen.count(False) == 2 and not any(seen[6:8])
    assert run.consensus.max() == 0


@pytest.mark.parametrize("value", [-0.1, 1, "0.9", True])
def test_the_momentum_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match="momentum"):
        signsgd(momentum=value)  # type: ignore[arg-type]

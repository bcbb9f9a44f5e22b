"""The original's QAdamOptimizer and QAdamAlgorithm."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
from tests.rank_pool import RankPool


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for step in range(8):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=generator)).square().sum().backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def _model() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _same_as_distribute(hierarchical: bool) -> None:
    import bagua.torch_api as _patched
    from bagua.torch_api.algorithms import Algorithm
    from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer

    assert _patched
    mine, reference = _model(), _model()
    optimizer = QAdamOptimizer(mine.parameters(), lr=1e-2, warmup_steps=4)
    algorithm = QAdamAlgorithm(optimizer, hierarchical=hierarchical)
    assert algorithm.warmup_steps == 4
    mine.with_bagua([optimizer], algorithm)  # type: ignore[operator]
    other = bagua.optim.QAdam(reference.parameters(), lr=1e-2, warmup_steps=4)
    bagua.distribute(reference, other, "qadam", hierarchical=hierarchical)
    left, right = _train(mine, optimizer), _train(reference, other)
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    assert isinstance(Algorithm.init("qadam", q_adam_optimizer=optimizer), QAdamAlgorithm)


@pytest.mark.parametrize("hierarchical", [False, True])
def test_same_as_distribute(pool: RankPool, hierarchical: bool) -> None:
    pool.run(3, _same_as_distribute, hierarchical, nodes=[0, 0, 1])


def test_signatures_of_the_original() -> None:
    from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer

    made = inspect.signature(QAdamOptimizer.__init__).parameters
    ours = {"variance_floor", "decoupled_weight_decay"}  # after the original's, so that calls by position are right
    assert set(list(made)[-2:]) == ours
    defaults = {name: made[name].default for name in list(made)[2:] if name not in ours}
    assert defaults == {
        "lr": 1e-3,
        "warmup_steps": 100,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert list(inspect.signature(QAdamAlgorithm.__init__).parameters) == ["self", "q_adam_optimizer", "hierarchical"]
    assert QAdamAlgorithm(QAdamOptimizer([nn.Parameter(torch.ones(2))])).hierarchical is True


def test_another_optimizer_is_refused() -> None:
    from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm

    with pytest.raises(TypeError, match="q_adam_optimizer.*QAdamOptimizer.*SGD"):
        QAdamAlgorithm(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))  # type: ignore[arg-type]

"""Two models that train side by side: the same as with torch's `DistributedDataParallel`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.original.training import WRAPPERS, flat, make_model, train, wrap
from tests.rank_pool import RankPool


def _two(wrapper: str) -> None:
    import bagua.torch_api as api

    rank = dist.get_rank()
    ours, theirs = ([make_model(10), make_model(20)] for _ in range(2))
    reference = [nn.parallel.DistributedDataParallel(model) for model in theirs]
    rates = (0.05, 0.1)
    mine = [torch.optim.SGD(model.parameters(), lr=lr) for model, lr in zip(ours, rates, strict=True)]
    other = [torch.optim.SGD(model.parameters(), lr=lr) for model, lr in zip(theirs, rates, strict=True)]
    algorithm = api.algorithms.gradient_allreduce.GradientAllReduceAlgorithm()  # one for both
    wrapped = [wrap(wrapper, model, optimizer, algorithm) for model, optimizer in zip(ours, mine, strict=True)]
    for step in range(6):
        for number in range(2):
            train(wrapped[number], mine[number], rank, [10 * number + step])
            train(reference[number], other[number], rank, [10 * number + step])
    for model, like in zip(ours, theirs, strict=True):
        assert torch.allclose(flat(model), flat(like), atol=1e-6)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_models(pool: RankPool, wrapper: str) -> None:
    pool.run(2, _two, wrapper)

"""All ranks have equal weights: those of one process that takes the mean of all ranks' gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.original.training import WRAPPERS, flat, loss_of, make_model, train, wrap
from tests.rank_pool import RankPool

SIZE, STEPS = 3, 10


def _ranks(wrapper: str, hierarchical: bool) -> list[float]:
    import bagua.torch_api as api

    rank = dist.get_rank()
    model = make_model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    algorithm = api.algorithms.gradient_allreduce.GradientAllReduceAlgorithm(hierarchical=hierarchical)
    train(model, optimizer, rank, [0])  # apart from the others
    train(wrap(wrapper, model, optimizer, algorithm), optimizer, rank, range(1, STEPS))
    return flat(model).tolist()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("hierarchical", [False, True])
def test_weights_are_those_of_one_process(pool: RankPool, wrapper: str, hierarchical: bool) -> None:
    model = make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 0, [0])
    for step in range(1, STEPS):
        optimizer.zero_grad()
        torch.stack([loss_of(model, step, rank) for rank in range(SIZE)]).mean().backward()
        optimizer.step()
    found = pool.run(SIZE, _ranks, wrapper, hierarchical, nodes=[0, 0, 1])
    assert all(weights == found[0] for weights in found)
    assert torch.allclose(torch.tensor(found[0]), flat(model), atol=1e-6)

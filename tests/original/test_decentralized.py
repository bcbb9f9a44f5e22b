"""Weights are averaged with peers and stepped with local gradients: as a simulation of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.original.training import WRAPPERS, flat, loss_of, make_model, put, train, wrap
from tests.rank_pool import RankPool

STEPS, LR = 6, 0.1


def _peer(rank: int, size: int, exchange: int) -> int:
    """The lower half meets the upper half, shifted by one in each exchange."""
    half = size // 2
    return (exchange + rank) % ((size + 1) // 2) + half if rank < half else (rank - half - exchange) % half


def _simulated(size: int, mode: str, interval: int) -> list[torch.Tensor]:
    models = [make_model(0) for _ in range(size)]
    for step in range(STEPS):
        weights = [flat(model) for model in models]
        mixed = weights
        if step % interval == 0:
            if mode == "all":
                mixed = [torch.stack(weights).mean(0)] * size
            else:
                peers = [_peer(rank, size, step // interval) for rank in range(size)]
                assert all(peers[peer] == rank for rank, peer in enumerate(peers))
                mixed = [(weights[rank] + weights[peers[rank]]) / 2 for rank in range(size)]
        for rank, model in enumerate(models):
            grads = torch.autograd.grad(loss_of(model, step, rank), list(model.parameters()))
            gradient = torch.cat([grad.reshape(-1) for grad in reversed(grads)])
            put(model, mixed[rank] - LR * gradient)
    return [flat(model) for model in models]


def _ranks(wrapper: str, members: int, options: dict[str, Any]) -> list[float] | None:
    import bagua.torch_api as api
    from bagua.torch_api.communication import _rank_not_in_group, new_group

    rank = dist.get_rank()
    group = new_group(ranks=list(range(members)))
    if _rank_not_in_group(group):
        return None
    model = make_model(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    algorithm = api.algorithms.decentralized.DecentralizedAlgorithm(**options)
    train(wrap(wrapper, model, optimizer, algorithm, group), optimizer, rank, range(STEPS))
    return flat(model).tolist()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("mode", "interval", "hierarchical"),
    [("all", 1, False), ("all", 2, True), ("shift_one", 1, False), ("shift_one", 2, False)],
)
def test_as_simulated_in_a_group_of_some_ranks(
    pool: RankPool, wrapper: str, mode: str, interval: int, hierarchical: bool
) -> None:
    options = {"peer_selection_mode": mode, "communication_interval": interval, "hierarchical": hierarchical}
    members = 2 if mode == "all" else 4
    *found, outside = pool.run(members + 1, _ranks, wrapper, members, options)
    assert outside is None
    for weights, expected in zip(found, _simulated(members, mode, interval), strict=True):
        assert torch.allclose(torch.tensor(weights), expected, atol=1e-6)

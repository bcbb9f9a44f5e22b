"""Loss scaling, as the original's benchmark and its ImageNet example use it: infinite gradients on one rank only.

torch's scaler looks at this rank's gradients. That is enough where they are the mean of all ranks'. With gossip one
rank would skip a step that the others make, which is an error that names `bagua.GradScaler`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
from tests.facade.old_style import MeanOfGradients, PeerWeights
from tests.original.training import flat, make_model
from tests.rank_pool import RankPool


def _train(algorithm: Any, scaler: Any) -> tuple[list[float], int]:
    rank = dist.get_rank()
    model = make_model(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], algorithm)
    steps = 0
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(torch.ones(3, 2)).float(), torch.zeros(3, 4))
        scaler.scale(loss * (float("inf") if step == 1 and rank == 1 else 1.0)).backward()
        before = flat(model)
        scaler.step(optimizer)
        scaler.update()
        steps += int(not torch.equal(before, flat(model)))
    assert flat(model).isfinite().all()
    return flat(model).tolist(), steps


def _scalers() -> list[int]:
    import bagua.torch_api as api
    from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm, LowPrecisionDecentralizedAlgorithm

    plain = torch.amp.GradScaler("cpu", init_scale=16.0)
    made = [
        _train(api.algorithms.gradient_allreduce.GradientAllReduceAlgorithm(), plain),
        _train(MeanOfGradients(), torch.amp.GradScaler("cpu", init_scale=16.0)),
    ]
    gossip = (DecentralizedAlgorithm(False), LowPrecisionDecentralizedAlgorithm(False), PeerWeights())
    for algorithm in gossip:
        with pytest.raises(RuntimeError, match=r"use bagua\.GradScaler, which takes the same arguments"):
            _train(algorithm, torch.amp.GradScaler("cpu", init_scale=16.0))
    made += [_train(algorithm, bagua.GradScaler("cpu", init_scale=16.0)) for algorithm in gossip]
    return [steps for _, steps in made]


def test_a_step_is_skipped_on_all_ranks(pool: RankPool) -> None:
    first, second = pool.run(2, _scalers)
    assert first == second
    assert first[:2] == [3, 3]

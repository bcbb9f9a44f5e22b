"""Rows of an embedding that no rank uses stay where they are: Adam makes whole steps of the smallest gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms import (
    Algorithm,
    ByteGrad,
    DiLoCo,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
    PowerSGD,
    SparseLoCo,
)
from bagua.comm.team import Team
from tests.rank_threads import run_teams

ROWS, WIDTH, STEPS = 300, 24, 12


def moved(team: Team, algorithm: Algorithm) -> Tensor:
    """How far each row has moved at most, where one of ten is used."""
    model = nn.Sequential(nn.EmbeddingBag(ROWS, WIDTH), nn.Linear(WIDTH, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    rows = next(model.parameters())
    bagua.distribute(model, optimizer, algorithm, process_group=team)
    before = rows.detach().clone()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + team.rank)
        used = 10 * torch.randint(0, ROWS // 10, (16, 4), generator=generator)
        optimizer.zero_grad()
        (model(used) - torch.randn(16, 5, generator=generator)).square().mean().backward()
        optimizer.step()
    bagua.detach(model)
    return (rows.detach() - before).abs().amax(1)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "algorithm",
    [
        GradientAllReduce(),
        *(ByteGrad(), ByteGrad(codec="minmax_uint8:block=100")),
        *(ByteGrad(codec="int4"), ByteGrad(error_feedback=True), LowPrecisionDecentralized(), LocalSGD()),
        *(GradientAllReduce(codec="eden:bits=2"), ByteGrad(codec="eden", gather_codec="eden:bits=2")),
        GradientAllReduce(codec="sign", error_feedback=False),
        *(DiLoCo(), DiLoCo(communication_interval=4, codec="eden"), LocalSGD(codec="eden")),
        SparseLoCo(communication_interval=4),
        *(PowerSGD(), PowerSGD(rank=8, error_feedback=False)),
    ],
    ids=[
        *("exact", "8 bits", "short blocks", "4 bits", "feedback", "gossip", "local steps"),
        *("rotated", "rotated, 1 bit", "signs", "outer steps", "outer steps in 1 bit", "local steps in 1 bit"),
        *("sparse", "low rank", "low rank without feedback"),
    ],
)
def test_rows_that_nobody_uses_stay(algorithm: Algorithm, size: int) -> None:
    used = torch.arange(ROWS) % 10 == 0
    for far in run_teams(size, moved, algorithm):
        assert not far[~used].any()
        assert (far[used] > 0.01).float().mean() > 0.8

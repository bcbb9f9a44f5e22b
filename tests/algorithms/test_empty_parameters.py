"""Parameters without elements: they train nothing, and nothing breaks, also after a warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from bagua.algorithms import AsyncModelAverage, ByteGrad, DiLoCo, LocalSGD, LowPrecisionDecentralized, PowerSGD
from tests.daily import one_in
from tests.engine.training import batch, equal, seeded, train, values
from tests.rank_pool import RankPool


class Sparse(nn.Module):
    """A linear layer between empty parameters; two of them take part in the loss, one never does."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.nothing = nn.ParameterList([nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.empty(0))] * empty)
        self.unused = nn.ParameterList([nn.Parameter(torch.empty(2, 0))] * empty)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + sum(each.sum() for each in self.nothing)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def qadam(params: Any) -> torch.optim.Optimizer:
    return bagua.optim.QAdam(params, lr=1e-2, warmup_steps=2)


def lamb(params: Any) -> torch.optim.Optimizer:
    return bagua.optim.OneBitLamb(params, lr=1e-2, warmup_steps=2)


def zero_one(params: Any) -> torch.optim.Optimizer:
    return bagua.optim.ZeroOneAdam(params, lr=1e-2, var_freeze_step=2, local_step_scaler=2, local_step_clipper=2)


CASES: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    **{row.name: (row.name, sgd) for row in bagua.algorithms.available(builtin_only=True)},
    "async": (AsyncModelAverage(sync_interval_ms=0), sgd),
    "qadam": ("qadam", qadam),
    "one_bit_lamb": ("one_bit_lamb", lamb),
    "zero_one_adam": ("zero_one_adam", zero_one),
    "diloco": (DiLoCo(communication_interval=2), sgd),
    "local_sgd": (LocalSGD(communication_interval=2), sgd),
    "mean_moments": ("decentralized", adamw),
    "moments_of_rounds": ("local_sgd", adamw),
    "moments_of_averages": (LocalSGD(communication_interval=2), adamw),
    "sign": (ByteGrad(codec="sign"), sgd),
    "int4": (ByteGrad(codec="int4"), sgd),
    "top_k": (ByteGrad(codec="top_k"), sgd),
    "power_sgd_1": (PowerSGD(rank=1, min_compression=1.0), sgd),
    "overlap": (LowPrecisionDecentralized(overlap=True), sgd),
}


def trainings(name: str) -> list[dict[str, Tensor]]:
    """With empty parameters beside others, without any, and with each alone in a bucket."""
    return [trained(name, empty, size) for empty, size in ((True, 1 << 20), (False, 1 << 20), (True, 1))]


def trained(name: str, empty: bool, bucket_bytes: int) -> dict[str, Tensor]:
    algorithm, make = CASES[name]
    model = seeded(lambda: Sparse(empty), dist.get_rank())
    optimizer = make(model.parameters())
    bagua.distribute(model, optimizer, algorithm, bucket_bytes=bucket_bytes, guard=bagua.Guard(every=3))
    train(model, optimizer, range(8))
    bagua.load_state_dict(model, bagua.state_dict(model))
    optimizer.load_state_dict(optimizer.state_dict())
    model.zero_grad()
    model(batch(0, 9)).sum().backward()
    optimizer.step()
    bagua.average_parameters(model)
    return {name: value for name, value in values(model).items() if name.startswith("linear")}


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_empty_parameters_change_nothing(pool: RankPool, name: str) -> None:
    for beside, without, alone in pool.run(2, trainings, name):
        assert all(value.isfinite().all() for each in (beside, alone) for value in each.values())
        if name != "async":  # depends on time
            assert equal(beside, without)

"""`torch.set_default_dtype` and `torch.set_default_device` of a script change nothing in what is computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms import GradientAllReduce, PowerSGD, Warmup
from bagua.algorithms.base import Exactness
from bagua.comm.team import Team
from benchmarks.convergence.delayed import DelayedAverage
from tests.contract.members import algorithm_classes, registered
from tests.rank_threads import run_teams
from tests.torch_defaults import DTYPES, default_dtype

SIZE, STEPS = 2, 9
OWN: dict[str, Callable[[Any], Any]] = {
    "qadam": lambda params: bagua.optim.QAdam(params, lr=0.01, warmup_steps=3),
    "one_bit_lamb": lambda params: bagua.optim.OneBitLamb(params, lr=0.01, warmup_steps=3),
    "zero_one_adam": lambda params: bagua.optim.ZeroOneAdam(params, lr=0.01, var_freeze_step=3),
    "dion": lambda params: [torch.optim.SGD(params[:2], lr=0.01), torch.optim.AdamW(params[2:], lr=0.01)],
    "demo": lambda params: torch.optim.SGD(params, lr=0.01),
    "signsgd": lambda params: torch.optim.SGD(params, lr=0.01),
}
OTHERS: dict[str, Any] = {
    "late averages": DelayedAverage(1, 1, mean_moments=True),
    "after a warm-up": Warmup(3, "gradient_allreduce", PowerSGD()),
    "2 bits": GradientAllReduce(codec="eden:bits=2"),
    "a trellis": GradientAllReduce(codec="eden:bits=2:states=8"),
}


class Words(nn.Module):
    """A table of which each rank uses a part, and a layer that rank 0 does not use in some steps."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(5)
        self.table, self.matrix, self.bias = (
            nn.Parameter(torch.randn(shape, generator=made, dtype=torch.float32)) for shape in ((40, 6), (6, 6), (6,))
        )

    def forward(self, rank: int, step: int) -> Tensor:
        made = torch.Generator().manual_seed(100 * step + rank)
        rows = torch.randint(40, (8,), generator=made)
        rest = torch.randn(8, 6, generator=made, dtype=torch.float32)
        x = self.table[rows] - rest
        return ((x if rank == 0 and step % 4 == 3 else x @ self.matrix + self.bias) ** 2).mean()


def train(team: Team, name: str, models: list[nn.Module], device: str | None) -> Tensor:
    """Weights after nine steps."""
    with torch.device(device) if device else nullcontext():
        model = models[team.rank]
        optimizer = OWN.get(name, lambda params: torch.optim.AdamW(params, lr=0.01))(list(model.parameters()))
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        algorithm = OTHERS.get(name, name)
        bagua.distribute(model, optimizers, algorithm, process_group=team)
        for step in range(STEPS):
            for each in optimizers:
                each.zero_grad()
            with torch.device("cpu"):
                loss = model(team.rank, step)
            loss.backward()
            for each in optimizers:
                each.step()
        bagua.average_parameters(model)
        saved = bagua.state_dict(model)
        bagua.load_state_dict(model, saved)
        bagua.detach(model)
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def weights(name: str, dtype: torch.dtype = torch.float32, device: str | None = None) -> list[Tensor]:
    models: list[nn.Module] = [Words() for _ in range(SIZE)]
    with default_dtype(dtype), registered():
        return run_teams(SIZE, train, name, copy.deepcopy(models), device)


@pytest.mark.parametrize("name", [*algorithm_classes(), *OTHERS])
def test_training(name: str) -> None:
    want = weights(name)
    others = [*(weights(name, dtype) for dtype in DTYPES[:2]), weights(name, device="meta")]
    algorithm = algorithm_classes().get(name)
    for dtype, other in zip([*DTYPES[:2], "meta"], others, strict=True):
        for mine, same in zip(want, other, strict=True):
            assert mine.dtype == same.dtype == torch.float32 and same.isfinite().all()
            if algorithm is None or algorithm.exactness is not Exactness.ASYNCHRONOUS:
                assert torch.equal(mine, same), (dtype, (mine - same).abs().max())

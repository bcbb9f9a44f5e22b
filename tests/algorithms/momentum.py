"""What the tests of the optimizers with quantised momenta share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import bagua
from bagua.codecs import Codec
from bagua.comm.team import Team
from tests.algorithms.quadratic import Quadratic, flat, target


@dataclass(frozen=True)
class Plain(Codec):
    """Loses nothing, but claims not to be linear: takes the way of the lossy codecs, so that algebra can be checked."""

    name: ClassVar[str] = "plain"
    linear: ClassVar[bool] = False
    lossless: ClassVar[bool] = True

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return n * dtype.itemsize

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        wire_RW.copy_(x_RN.contiguous().view(torch.uint8))

    def _decode(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        out_RN.copy_(wire_RW.contiguous().view(out_RN.dtype))


def train(team: Team, model: Quadratic, optimizer: torch.optim.Optimizer, steps: range, none: bool = False) -> None:
    for step in steps:
        optimizer.zero_grad(set_to_none=none)
        model(torch.tensor(target(team.rank, step), dtype=torch.float32)).backward()
        optimizer.step()


def interrupted(team: Team, make: Callable[[Any], Any], algorithm: Any, stop: int, steps: int) -> tuple[Tensor, ...]:
    """Weights after `steps` steps: in one go, and saved and loaded into fresh objects after `stop`."""
    model = Quadratic()
    optimizer = make(model.parameters())
    bagua.distribute(model, optimizer, algorithm, process_group=team, bucket_bytes=100)
    train(team, model, optimizer, range(stop))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), bagua.state_dict(model)])
    train(team, model, optimizer, range(stop, steps))
    whole = flat(model).detach().clone()
    bagua.detach(model)

    model = Quadratic()
    optimizer = make(model.parameters())
    bagua.distribute(model, optimizer, algorithm, process_group=team, bucket_bytes=100)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    bagua.load_state_dict(model, saved[2])
    train(team, model, optimizer, range(stop, steps))
    resumed = flat(model).detach().clone()
    bagua.detach(model)
    return whole, resumed

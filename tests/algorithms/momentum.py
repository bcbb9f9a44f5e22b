"""What the tests of the optimizers with quantised momenta share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
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


def interrupted(
    team: Team,
    make: Callable[[Any], Any],
    algorithm: Any,
    stops: Sequence[int],
    steps: int,
    optimizer_last: bool = False,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Weights after `steps` steps: in one go, and, by stop, saved and loaded into fresh objects after that step."""
    model = Quadratic()
    optimizer = make(model.parameters())
    bagua.distribute(model, optimizer, algorithm, process_group=team, bucket_bytes=100)
    saved, done = {}, 0
    for stop in sorted(stops):
        train(team, model, optimizer, range(done, stop))
        saved[stop], done = copy.deepcopy([model.state_dict(), optimizer.state_dict(), bagua.state_dict(model)]), stop
    train(team, model, optimizer, range(done, steps))
    whole = flat(model).detach().clone()
    bagua.detach(model)

    resumed = {}
    for stop, states in saved.items():
        model = Quadratic()
        optimizer = make(model.parameters())
        bagua.distribute(model, optimizer, algorithm, process_group=team, bucket_bytes=100)
        model.load_state_dict(states[0])
        if not optimizer_last:
            optimizer.load_state_dict(states[1])
        bagua.load_state_dict(model, states[2])
        if optimizer_last:
            optimizer.load_state_dict(states[1])
        train(team, model, optimizer, range(stop, steps))
        resumed[stop] = flat(model).detach().clone()
        bagua.detach(model)
    return whole, resumed

"""`bagua.module_state_dict`: a part of a distributed module takes the place of that part only."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
from tests.engine.training import Net, distributed, equal, seeded, train
from tests.rank_pool import RankPool


def size(state: Any) -> int:
    stream = io.BytesIO()
    torch.save(state, stream)
    return len(stream.getvalue())


class WithHead(Net):
    """Its head is small, its body shares a bucket with it."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(300, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.big.weight.sum() + self.big.bias.sum()


def saved(algorithm: str) -> list[bool]:
    model, optimizer = distributed(WithHead, algorithm)
    train(model, optimizer, range(2))
    plain = seeded(WithHead, 0)
    pairs = [(model.last, plain.last), (model.inner, plain.inner), (model.norm, plain.norm), (model, plain)]
    found = [size(bagua.module_state_dict(part)) == size(alike.state_dict()) for part, alike in pairs]
    if algorithm == "decentralized":
        found.append(size(model.last.state_dict()) > 90_000 * 4)  # what this is for
    state = bagua.module_state_dict(model)
    found.append(equal(dict(state), dict(model.state_dict())) and list(state) == list(model.state_dict()))
    found.append(state._metadata == model.state_dict()._metadata)
    found.append(state["tied.weight"].data_ptr() == state["inner.0.weight"].data_ptr())
    before = {name: value.clone() for name, value in state.items()}
    train(model, optimizer, range(2, 4))
    found.append(equal(before, dict(state)) and not equal(before, dict(model.state_dict())))
    plain.load_state_dict(state)
    found.append(equal(dict(plain.state_dict()), before))
    return found


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized"])
def test_a_part_takes_no_more_than_its_own_place(pool: RankPool, algorithm: str) -> None:
    """As many bytes as saved from a module that was never distributed; a copy; tied weights stay tied."""
    for found in pool.run(2, saved, algorithm):
        assert all(found), found


def test_plain_modules_and_others() -> None:
    assert not dist.is_initialized()
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert equal(dict(bagua.module_state_dict(module)), dict(module.state_dict()))
    empty = nn.ParameterList([nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(0, 3))])
    assert [tuple(each.shape) for each in bagua.module_state_dict(empty).values()] == [(0, 3), (0, 3)]
    with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.Module, got dict"):
        bagua.module_state_dict({})  # type: ignore[arg-type]

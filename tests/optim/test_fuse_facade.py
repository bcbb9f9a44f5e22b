"""`fuse_optimizer` and `fuse_step` for scripts of the original."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn, optim

from bagua.torch_api import report
from bagua.torch_api.contrib import fuse_optimizer
from bagua.torch_api.contrib.fuse.optimizer import is_fused_optimizer
from tests.optim.optimizers import Lamb


def train(kind: Any, options: dict[str, Any], fused: bool, do_flatten: bool = True) -> list[torch.Tensor]:
    """Ten steps, every other one with `fuse_step`, as the original's test has it."""
    torch.manual_seed(0)
    flat = torch.randn(60)  # the user's own: parameters that lie side by side
    parts = [nn.Parameter(part) for part in flat.split([10, 20, 30])]
    model = nn.Sequential(nn.Linear(4, 10), nn.Linear(10, 3))
    params = [*parts, *model.parameters()]
    optimizer = kind(params, **options)
    if fused:
        assert fuse_optimizer(optimizer, do_flatten=do_flatten) is optimizer
        assert is_fused_optimizer(optimizer)
    for step in range(10):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).square().mean() + sum(part.sin().sum() for part in parts)
        loss.backward()
        optimizer.fuse_step() if fused and step % 2 else optimizer.step()
    if fused and not do_flatten:
        assert parts[0].data_ptr() == flat.data_ptr()
        stepper = vars(optimizer)["_bagua_stepper"]
        assert [len(arena.params) for arena in stepper.arenas] == [3]
    return [param.detach() for param in params]


@pytest.mark.parametrize("do_flatten", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"), [(optim.SGD, {"lr": 0.1, "momentum": 0.9}), (optim.Adam, {}), (optim.RMSprop, {})]
)
def test_fuse_step(kind: Any, options: dict[str, Any], do_flatten: bool) -> None:
    plain, fused = train(kind, options, False), train(kind, options, True, do_flatten)
    assert all(torch.equal(a, b) for a, b in zip(plain, fused, strict=True))


def test_lamb_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    report._said.clear()
    with caplog.at_level(logging.WARNING, "bagua"):
        plain, fused = train(Lamb, {}, False), train(Lamb, {}, True)
    assert "Lamb cannot be fused" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(plain, fused, strict=True))


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="expected a torch.optim.Optimizer"):
        fuse_optimizer([])  # pyright: ignore[reportArgumentType]

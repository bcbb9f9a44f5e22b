"""Steps on flat tensors alternate with plain steps: the same numbers, bit for bit, and something was fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from tests.original.training import flat
from tests.rank_pool import RankPool

EPOCHS = 21
CONFIGURATIONS: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.2, "momentum": 1, "weight_decay": 1, "nesterov": True}),
    (optim.SGD, {"lr": 0.2, "momentum": 1, "dampening": 0.5, "weight_decay": 1}),
    *(
        (kind, {"weight_decay": wd, "amsgrad": ams})
        for kind in (optim.Adam, optim.AdamW)
        for wd in (1.0, 0.0)
        for ams in (True, False)
    ),
    (optim.RMSprop, {"weight_decay": 1, "momentum": 1, "centered": True}),
    (optim.RMSprop, {"weight_decay": 1, "momentum": 0, "centered": True}),
    (optim.RMSprop, {"weight_decay": 0, "momentum": 1, "centered": False}),
    (optim.Rprop, {"lr": 1e-2, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50)}),
    *((kind, {"weight_decay": wd}) for kind in (optim.ASGD, optim.Adamax, optim.Adadelta) for wd in (0, 1)),
]


def _model_and_optimizer(kind: Any, options: dict[str, Any]) -> tuple[Any, optim.Optimizer]:
    """Two layers; weights decay at another rate than biases, so in groups of their own."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid())
    weights = [param for name, param in model.named_parameters() if "bias" not in name]
    biases = [param for name, param in model.named_parameters() if "bias" in name]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    if kind is optim.Rprop:
        groups = [{"params": weights}, {"params": biases}]
    return model, kind(groups, **options)


def _train(model: nn.Module, optimizer: Any, fused: bool) -> torch.Tensor:
    inputs = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]).reshape(3, 2)
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.fuse_step() if fused and epoch % 2 == 0 else optimizer.step()
    return flat(model)


@pytest.mark.parametrize(("kind", "options"), CONFIGURATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_alternating_steps(kind: Any, options: dict[str, Any]) -> None:
    import bagua.torch_api as api

    expected = _train(*_model_and_optimizer(kind, options), fused=False)
    model, optimizer = _model_and_optimizer(kind, options)
    fused: Any = api.contrib.fuse_optimizer(optimizer, do_flatten=True)
    assert torch.equal(_train(model, fused, fused=True), expected)
    assert fused._bagua_fused_count >= EPOCHS // 2 + 1, "a group in every fused step"


def _with_bagua() -> None:
    import bagua.torch_api as api
    from bagua.torch_api.algorithms import Algorithm

    for name in ("gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized"):
        for fuses_first in (True, False):
            weights: list[torch.Tensor] = []
            for fused in (False, True):
                model, optimizer = _model_and_optimizer(optim.Adam, {})
                if fused and fuses_first:
                    api.contrib.fuse_optimizer(optimizer)
                model.with_bagua([optimizer], Algorithm.init(name, hierarchical=False))
                if fused and not fuses_first:
                    api.contrib.fuse_optimizer(optimizer)
                weights.append(_train(model, optimizer, fused))
            assert torch.equal(*weights), (name, fuses_first)


def test_with_every_algorithm_before_and_after(pool: RankPool) -> None:
    pool.run(2, _with_bagua)


def test_names() -> None:
    from bagua.torch_api.contrib.fuse.optimizer import fuse_optimizer, fuse_step, is_fused_optimizer

    _, optimizer = _model_and_optimizer(optim.SGD, {"lr": 0.1})
    assert not is_fused_optimizer(optimizer)
    with pytest.raises(ValueError, match=r"call fuse_optimizer\(\) on it first"):
        fuse_step(optimizer)
    assert is_fused_optimizer(fuse_optimizer(optimizer))

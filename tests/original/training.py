"""The model and the loop that most of the original's tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

WRAPPERS = ("with_bagua", "DistributedDataParallel")


def make_model(seed: int) -> Any:
    """720 parameters in four tensors, one of them a bias."""
    torch.manual_seed(seed)
    layers = (nn.Linear(2, 10, bias=False), nn.ReLU(), nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 4, bias=False))
    return nn.Sequential(*layers, nn.Softmax(dim=1))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Every rank has its own data in each step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs, target = torch.randn(4, 2, generator=generator), torch.randn(4, 4, generator=generator)
    return nn.functional.mse_loss(model(inputs), target)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Sequence[int]) -> None:
    """A plain loop."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def wrap(wrapper: str, model: Any, optimizer: torch.optim.Optimizer, algorithm: Any, group: Any = None) -> Any:
    """Distribute by one of the original's two ways."""
    if wrapper == "with_bagua":
        return model.with_bagua([optimizer], algorithm, process_group=group)
    from bagua.torch_api.data_parallel import DistributedDataParallel

    return DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm, process_group=group)


def flat(model: nn.Module) -> torch.Tensor:
    """All weights, the last parameter first, as the original's buckets have them."""
    return torch.cat([param.detach().reshape(-1) for param in reversed(list(model.parameters()))])


def put(model: nn.Module, weights: torch.Tensor) -> None:
    """Undo `flat`."""
    at = 0
    with torch.no_grad():
        for param in reversed(list(model.parameters())):
            param.copy_(weights[at : at + param.numel()].view_as(param))
            at += param.numel()

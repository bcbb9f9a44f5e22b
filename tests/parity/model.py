"""The model, the data and the loop that all rows of the matrix share. Runs within a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS = 6
FEATURES = 6


class Small(nn.Module):
    """Root-level, tied and frozen parameters and a buffer; no batch statistics, so halves of a batch add up."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.first = nn.Linear(FEATURES, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.middle[0].weight
        self.last = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(1)
        x = self.norm(self.middle(self.first(x).tanh()))
        return self.last(self.tied(self.frozen(x)).tanh()) * self.scale


class Branches(nn.Module):
    """`forward(x, use)` goes through the named branches only."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(FEATURES, 3) for _ in range(count)])

    def forward(self, x: Tensor, use: Sequence[int]) -> Tensor:
        return torch.stack([self.branches[index](x) for index in use]).sum(0)


def batch(step: int, rank: int | None = None, rows: int = 4) -> Tensor:
    """The data of one rank (default: this one) and step: [rows, FEATURES]."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(1000 * rank + step))


def target(step: int, rank: int | None = None) -> Tensor:
    """Something to learn for `batch`: [rows, 3]."""
    return batch(step, rank)[:, :3].roll(1, 1).sign()


def loss_of(model: nn.Module, step: int, *args: Any) -> Tensor:
    """The mean squared error of one rank and step."""
    return (model(batch(step), *args).float() - target(step)).square().mean()


def train(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    steps: Iterable[int] = range(STEPS),
    backward: Callable[[int], object] | None = None,
) -> None:
    """Plain steps; `backward(step)` does something else than the usual forward and backward pass."""
    every = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for step in steps:
        for optimizer in every:
            optimizer.zero_grad()
        if backward is None:
            loss_of(model, step).backward()
        else:
            backward(step)
        for optimizer in every:
            optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, tied ones once."""
    return {name.removeprefix("_orig_mod."): p.detach().clone() for name, p in model.named_parameters()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Equal to the last bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Root of the sum of squared differences."""
    assert left.keys() == right.keys()
    return float(sum((left[name].double() - right[name].double()).square().sum() for name in left) ** 0.5)


def same_everywhere(tensors: dict[str, Tensor]) -> bool:
    """Whether all ranks hold the same bits. Collective; the answer is the same on all ranks."""
    flat = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors.values()])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    return all(torch.equal(row, rows[0]) for row in rows)


def mean_everywhere(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean over the ranks of each tensor. Collective."""
    means = {}
    for name, tensor in tensors.items():
        total = tensor.detach().double()
        dist.all_reduce(total)
        means[name] = total / dist.get_world_size()
    return means

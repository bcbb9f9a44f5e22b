"""Small models and loops that run within a rank; everything here must be importable by the rank processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua

_seeding = threading.Lock()


class Net(nn.Module):
    """Nested, tied, frozen and root-level parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))  # root level: the original never synchronised these
        self.first = nn.Linear(6, 5)
        self.inner = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.last = nn.Linear(5, 3)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.inner[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(self.first(x)))
        return self.last(self.tied(self.frozen(x)).relu()) * self.scale


class Branches(nn.Module):
    """`forward(x, use)` goes through the named branches only."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(4, 4) for _ in range(count)])

    def forward(self, x: Tensor, use: Sequence[int]) -> Tensor:
        return torch.stack([self.branches[index](x) for index in use]).sum()


def batch(rank: int, step: int, features: int = 6) -> Tensor:
    """Data of one rank and step."""
    return torch.randn(4, features, generator=torch.Generator().manual_seed(1000 * rank + step))


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model with weights from `seed`; ranks that are threads share torch's generator."""
    with _seeding:
        torch.manual_seed(seed)
        return make()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int], set_to_none: bool = True) -> None:
    """Plain training steps; the data depends on rank and step."""
    rank = dist.get_rank()
    for step in steps:
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, copied."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients, copied."""
    return {n: None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()}


def equal(left: Any, right: Any) -> bool:
    """Nested dicts, lists and tensors equal to the last bit."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right


def distributed(
    make: Callable[[], nn.Module] = Net,
    algorithm: str = "gradient_allreduce",
    seed_by_rank: bool = True,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A distributed model with an SGD optimizer; ranks start from different weights unless told otherwise."""
    model = seeded(make, dist.get_rank() if seed_by_rank else 0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    return bagua.distribute(model, optimizer, algorithm, **options), optimizer

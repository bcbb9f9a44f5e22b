"""A model whose gradients are known in closed form, so that an algorithm can be checked against a numpy oracle.

Rank r minimises |x - t(r, step)|^2 / 2 over two parameters laid out as x = (b, w) in the order of the buckets.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bagua
from bagua.comm.team import Team

SHAPES = {"w": (7, 5), "b": (11,)}
N = 46


class Quadratic(nn.Module):
    """`forward(target)` is the loss."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.w = nn.Parameter(torch.randn(*SHAPES["w"], generator=generator))
        self.b = nn.Parameter(torch.randn(*SHAPES["b"], generator=generator))

    def forward(self, target: Tensor) -> Tensor:
        return (flat(self) - target).square().sum() / 2


def flat(model: nn.Module) -> Tensor:
    """x, as one vector."""
    return torch.cat([model.b.reshape(-1), model.w.reshape(-1)])  # type: ignore[operator]


@cache  # a generator takes as long as a step of the model
def target(rank: int, step: int) -> np.ndarray:
    """t(r, step), not to be written to."""
    found = np.random.default_rng([rank, step]).normal(size=N)
    found.setflags(write=False)
    return found


def start() -> np.ndarray:
    """x before the first step."""
    return flat(Quadratic()).detach().double().numpy()


def follow(
    team: Team, algorithm: Any, steps: int, make_optimizer: Any = None, **options: Any
) -> tuple[np.ndarray, bagua.Stats]:
    """Weights after each step, [steps, N], and the statistics at the end."""
    model = Quadratic()
    optimizer = (make_optimizer or (lambda params: torch.optim.SGD(params, lr=0.1)))(model.parameters())
    bagua.distribute(model, optimizer, algorithm, process_group=team, **options)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.tensor(target(team.rank, step), dtype=torch.float32)).backward()
        optimizer.step()
        seen.append(flat(model).detach().double().numpy().copy())
    stats = bagua.stats(model)
    bagua.detach(model)
    return np.stack(seen), stats


def simulated(size: int, algorithm: Any, steps: int, make_optimizer: Any) -> list[tuple[np.ndarray, bagua.Stats]]:
    """What `follow` returns, for all ranks, from the simulator; for runs of hundreds of steps."""
    seen: list[list[np.ndarray]] = [[] for _ in range(size)]

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        seen[rank].append(flat(model).detach().double().numpy().copy())
        return model(torch.tensor(target(rank, step), dtype=torch.float32))

    run = bagua.simulate(
        algorithm, ranks=size, model=Quadratic, loss=loss, steps=steps, optimizer=make_optimizer, seed=0
    )
    last = [flat(model).detach().double().numpy() for model in run.models]
    return [(np.stack([*seen[rank][1:], last[rank]]), run.stats[rank]) for rank in range(size)]


def targets(size: int, step: int) -> np.ndarray:
    """All ranks' targets, [size, N]."""
    return np.stack([target(rank, step) for rank in range(size)])

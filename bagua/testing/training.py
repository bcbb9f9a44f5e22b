"""A small model that several ranks of this process train, for the contract of algorithms."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from bagua.algorithms import Algorithm, Exactness
from bagua.comm.team import Team
from bagua.simulation.ranks import run_in_turns

__all__ = ["Case", "Model", "Run", "batch", "on_ranks", "sgd", "train"]

_R = TypeVar("_R")
_threads = itertools.count()


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of cases that name none."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """An algorithm and the training it is checked with.

    Attributes:
        algorithm: an instance.
        optimizer: makes the optimizer from parameters.
        ranks: how many; even, since half of them are the second node of a check.
        steps: training steps of a run.
    """

    algorithm: Algorithm
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    ranks: int = 4
    steps: int = 12

    @property
    def repeatable(self) -> bool:
        """Whether two runs give the same bits."""
        return self.algorithm.exactness is not Exactness.ASYNCHRONOUS

    @cached_property
    def trained(self) -> list[Run]:
        """Whole runs by rank, see `train`."""
        return train(self)

    @property
    def nodes(self) -> list[int]:
        """Two nodes, each with half of the ranks."""
        return [2 * rank // self.ranks for rank in range(self.ranks)]


class Model(nn.Module):
    """Two layers, one that no rank uses, and one that each rank uses in some steps only.

    Args:
        idle: make the latter two.
    """

    def __init__(self, idle: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 24)
        self.never = nn.Linear(24, 3) if idle else None
        self.sometimes = nn.Linear(24, 2) if idle else None
        self.last = nn.Linear(24, 2)

    def forward(self, x: Tensor, also: bool = False) -> Tensor:
        """[B, 5] to [B, 2]; `also` uses the layer `sometimes`."""
        hidden = torch.tanh(self.first(x))
        y = self.last(hidden)
        return y + self.sometimes(hidden) if also and self.sometimes is not None else y


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs of a rank and step, and what a line that is the same for all makes of them."""
    generator = torch.Generator().manual_seed(1 + 1000 * rank + step)
    x = torch.randn(16, 5, generator=generator)
    line = torch.linspace(-1, 1, 10).view(5, 2)
    return x, x @ line + 0.1 * torch.randn(16, 2, generator=generator)


@dataclass
class Run:
    """One rank's training, and what came of each step."""

    case: Case
    team: Team
    idle: bool = False
    weights: list[Tensor] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.team.rank)  # rank 0's weights are the ones to start with
            self.model = Model(self.idle)
        self.optimizer = self.case.optimizer(self.model.parameters())
        self.distribute()
        self.loss_before = self.loss()

    def distribute(self) -> None:
        """Several buckets, on two lanes."""
        bagua.distribute(
            self.model, self.optimizer, self.case.algorithm, process_group=self.team, bucket_bytes=150, num_lanes=2
        )

    def train(self, steps: Iterable[int], passes: int = 1) -> Run:
        """Train; with several passes, all but the last of a step do not synchronise."""
        for step in steps:
            x_B5, y_B2 = batch(self.team.rank, step)
            for number, (x, y) in enumerate(zip(x_B5.chunk(passes), y_B2.chunk(passes), strict=True)):
                also = (step + self.team.rank) % 3 == 0
                if number + 1 < passes:
                    with bagua.no_sync(self.model):
                        self._backward(x, y, also, passes)
                else:
                    self._backward(x, y, also, passes)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=step % 2 == 0)
            self.weights.append(self.flat())
            self.sent.append(self.bytes_sent())
        return self

    def _backward(self, x: Tensor, y: Tensor, also: bool, passes: int) -> None:
        ((self.model(x, also) - y).square().mean() / passes).backward()

    def loss(self) -> float:
        """On data apart, the same on all ranks."""
        self.model.eval()
        with torch.no_grad():
            parts = [(self.model(x) - y).square().mean().item() for x, y in (batch(99, k) for k in range(8))]
        self.model.train()
        return sum(parts) / len(parts)

    def flat(self) -> Tensor:
        """All weights, as one vector."""
        return torch.cat([param.detach().reshape(-1) for param in self.model.parameters()])

    def bytes_sent(self) -> int:
        """Since the start; 0 while it is not distributed."""
        return bagua.stats(self.model).total.bytes_sent

    def save(self) -> bytes:
        """All state of this rank, through `torch.save`."""
        stream = io.BytesIO()
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**parts, "algorithm": bagua.state_dict(self.model)}, stream)
        return stream.getvalue()

    def load(self, saved: bytes) -> Run:
        """Put back what `save` gave."""
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        bagua.load_state_dict(self.model, state["algorithm"])
        return self

    def close(self) -> Run:
        """Detach."""
        bagua.detach(self.model)
        return self


def train(case: Case, nodes: Sequence[int] | None = None) -> list[Run]:
    """Run `case` on all ranks; in the end their weights are averaged."""

    def main(team: Team) -> Run:
        run = Run(case, team).train(range(case.steps))
        bagua.average_parameters(run.model)
        return run.close()

    return on_ranks(case, main, nodes=nodes)


def on_ranks(
    case: Case, function: Callable[[Team], _R], *, nodes: Sequence[int] | None = None, ranks: int | None = None
) -> list[_R]:
    """Call `function(team)` on the ranks of `case`: in turns, or for an asynchronous algorithm at once, over gloo.

    Raises:
        BaseException: what a rank raised.
    """
    size = case.ranks if ranks is None else ranks
    if case.repeatable:
        return run_in_turns(size, function, nodes)
    name, store, timeout = f"contract{next(_threads)}", dist.HashStore(), timedelta(seconds=60)
    node = [str(nodes[rank] if nodes is not None else 0) for rank in range(size)]
    teams = [Team(rank, size, store, timeout, "gloo", f"{name}/{rank}", node[rank]) for rank in range(size)]
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def main(team: Team) -> None:
        try:
            results[team.rank] = function(team)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=main, args=(team,), daemon=True) for team in teams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * timeout.total_seconds())
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]

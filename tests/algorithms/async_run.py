"""One rank's training loop with "async", for the tests of asynchronous model averaging."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import bagua
from tests.algorithms.quadratic import Quadratic, flat, start, target

LR = 0.01
PATIENCE_S = 60.0


class Drift(Quadratic):
    """The gradient is the target itself, whatever the weights are."""

    def forward(self, target: Tensor) -> Tensor:
        return (flat(self) * target).sum()


class Run:
    """One rank's training loop."""

    def __init__(
        self,
        team: Any,
        make: Callable[[], nn.Module] = Drift,
        algorithm: Any = "async",
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        **options: Any,
    ):
        self.team, self.steps, self.model = team, 0, make()
        self.optimizer = optimizer(self.model.parameters(), lr=LR)
        if algorithm == "async":
            options.setdefault("codec", "identity")  # averages keep the mean of the replicas, but for rounding
        bagua.distribute(self.model, self.optimizer, algorithm, process_group=team, **options)

    def train(self, steps: int = 1, pause_s: float = 0.0) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(self.data()).backward()
            self.optimizer.step()
            self.steps += 1
            time.sleep(pause_s)

    def data(self) -> Tensor:
        return torch.tensor(target(self.team.rank, self.steps) + self.team.rank, dtype=torch.float32)

    def train_until(self, done: Callable[[], bool], pause_s: float = 0.001) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, (self.team.rank, bagua.stats(self.model))
            self.train(1, pause_s)

    @property
    def rounds(self) -> int:
        series = bagua.stats(self.model).extra.get("round_s")
        return series.count if series else 0

    def train_rounds(self, more: int, finished: Sequence[threading.Event] = ()) -> None:
        """Train until `more` rounds are over, and then on until all ranks have `finished` too.

        Needed where ranks begin to count at different moments: one may be a round ahead, and the last round of the
        other takes all ranks.
        """
        goal = self.rounds + more
        self.train_until(lambda: self.rounds >= goal)
        if finished:
            finished[self.team.rank].set()
            self.train_until(lambda: all(event.is_set() for event in finished))

    def x(self) -> np.ndarray:
        return flat(self.model).detach().double().numpy().copy()

    def local(self) -> np.ndarray:
        """Where this rank's own gradients would have taken it."""
        return start() - LR * sum(target(self.team.rank, step) + self.team.rank for step in range(self.steps))


def together(size: int) -> Callable[[], None]:
    """A bounded barrier for threads."""
    barrier = threading.Barrier(size, timeout=PATIENCE_S)

    def meet() -> None:
        barrier.wait(PATIENCE_S)

    return meet


def events(size: int) -> list[threading.Event]:
    """For `Run.train_rounds`."""
    return [threading.Event() for _ in range(size)]

"""A small training on ranks that are threads, with reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import bagua
from bagua.comm.team import Team


class Loop:
    """A distributed module and its optimizer.

    Attributes:
        module: the module.
        optimizer: its optimizer.
    """

    def __init__(self, team: Team | None = None, algorithm: Any = "gradient_allreduce", **options: Any) -> None:
        self.team = team
        self.module = nn.Linear(6, 4)
        nn.init.zeros_(self.module.weight)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.distribute(algorithm, **options)

    def distribute(self, algorithm: Any, **options: Any) -> None:
        """Distribute, or switch the algorithm."""
        bagua.distribute(self.module, self.optimizer, algorithm, process_group=self.team, **options)

    def train(self, steps: int) -> None:
        """Make steps."""
        for _ in range(steps):
            self.module(torch.ones(2, 6)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


class Recorder(bagua.metrics.Sink):
    """Keeps what it gets. `moments` are the calls: "open RANK", (steps, steps since), "close"."""

    def __init__(self, fails: Sequence[str] = ()) -> None:
        self.moments: list[Any] = []
        self.stats: list[bagua.Stats] = []
        self.alone: bool | None = None
        self.fails = fails

    def open(self, rank: int, *, alone: bool) -> None:
        self.alone = alone
        self._note(f"open {rank}", "open")

    def write(self, stats: bagua.Stats, since: bagua.Stats) -> None:
        self.stats.append(stats)
        self._note((stats.steps, since.steps), "write")

    def close(self) -> None:
        self._note("close", "close")

    def _note(self, moment: Any, what: str) -> None:
        self.moments.append(moment)
        if what in self.fails:
            raise OSError(f"{what} failed")

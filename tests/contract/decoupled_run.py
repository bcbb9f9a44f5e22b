"""One rank's training loop with "decoupled_diloco", for its tests: what a rank sees of the rounds, and how to wait."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import bagua
from bagua.algorithms import Context
from bagua.contrib import count_tokens
from bagua.contrib.decoupled_diloco import DecoupledDiLoCo
from bagua.contrib.decoupled_rounds import Rounds, SharedRounds
from tests.algorithms.quadratic import Quadratic, flat, target
from tests.contract.members import CONTRIB_ALGORITHMS

assert CONTRIB_ALGORITHMS["decoupled_diloco"] is DecoupledDiLoCo  # and no longer registered, where other tests look
LR, PATIENCE_S = 0.1, 60.0


class Watched(SharedRounds):
    """Keeps a digest of anchor and momentum after each round, and its members."""

    digests: list[str]
    offers: list[list[float]]

    def run(self, offers: Any, groups: Any) -> None:
        super().run(offers, groups)
        self.__dict__.setdefault("digests", []).append(self.digest())
        self.__dict__.setdefault("offers", []).append([offer[0] for offer in offers])
        self.__dict__["settled"] = self.rounds

    def digest(self) -> str:
        """Of all that must be the same on all ranks."""
        parts = [t for each in self.merging for t in (each.anchor, each.momentum) if t is not None]
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


@dataclass(frozen=True)
class Visible(DecoupledDiLoCo):
    """Lets tests see the state that the lane and the training thread share."""

    def setup(self, ctx: Context) -> None:
        super().setup(ctx)
        shared = ctx.keep("rounds", Rounds).shared
        assert shared is not None
        shared.__class__ = Watched
        ctx.optimizers[0].shared = shared  # pyright: ignore[reportAttributeAccessIssue]


class Run:
    """One rank's training loop."""

    def __init__(self, team: Any, tokens: int = 0, **options: Any) -> None:
        options.setdefault("min_steps", options["communication_interval"])
        self.team, self.steps, self.tokens = team, 0, tokens
        self.algorithm = Visible(**options)
        self.before: list[list[float]] = []
        self._distribute()

    def _distribute(self) -> None:
        self.model = Quadratic()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=LR)
        bagua.distribute(self.model, self.optimizer, self.algorithm, process_group=self.team, bucket_bytes=16)

    @property
    def shared(self) -> Watched:
        return self.optimizer.shared

    @property
    def offers(self) -> list[list[float]]:
        """Steps that each rank has brought to each round, the same on all ranks."""
        return self.before + self.shared.__dict__.get("offers", [])

    def resume(self) -> None:
        """Save, and go on with new objects. Collective."""
        saved, weights, old = bagua.state_dict(self.model), self.model.state_dict(), self.model
        self.before = self.offers
        self._distribute()
        self.model.load_state_dict(weights)
        bagua.load_state_dict(self.model, saved)
        bagua.detach(old)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.tensor(target(self.team.rank, self.steps), dtype=torch.float32)).backward()
            if self.tokens:
                count_tokens(self.optimizer, self.tokens)
            self.optimizer.step()
            self.steps += 1

    def train_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, (self.team.rank, bagua.stats(self.model))
            self.train()
            time.sleep(0.001)

    def await_rounds(self, number: int) -> None:
        """Stand still until this rank's lane has done so many rounds."""
        wait_for(lambda: self.shared.__dict__.get("settled", 0) >= number)

    def x(self) -> np.ndarray:
        return flat(self.model).detach().double().numpy().copy()

    def anchor(self) -> np.ndarray:
        """In the order of x: b makes the last bucket, w the first, or both are one."""
        plan = bagua.state_dict(self.model)["plan"]
        parts = {names[0]: each.anchor for names, each in zip(plan, self.shared.merging, strict=True)}
        return torch.cat([parts["b"], parts["w"]]).double().numpy().copy()


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "nothing came of it"
        time.sleep(0.001)


class Script:
    """Turns, one after the other: of one rank, while the others stand still, or of all at once (None)."""

    def __init__(self, size: int, turns: list[tuple[int | None, Callable[[Run], None]]]) -> None:
        self.turns, self._barrier = turns, threading.Barrier(size)

    def play(self, run: Run) -> None:
        for rank, act in self.turns:
            if rank is None or rank == run.team.rank:
                act(run)
            self._barrier.wait(PATIENCE_S)

"""A rank is lost while the ranks take the mean of their replicas: it counts on all survivors or on none."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import (
    AsyncModelAverage,
    Decentralized,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
    ZeroOneAdam,
)
from bagua.comm.team import Team
from bagua.engine.recovery import mean
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.replicas import Replicas
from bagua.errors import CommunicationError
from tests.daily import one_in
from tests.engine.membership_store import Killed, drop_rank
from tests.engine.shared_membership import SharedMembership
from tests.engine.test_recovery_rounds import Script
from tests.rank_threads import run_teams

SIZE = 3
POINTS = 3  # that a rank comes to: "begin", where it waits for the others; "exchange"; "end", where all have the mean
ALGORITHMS = {
    "decentralized": Decentralized(),
    "low_precision": LowPrecisionDecentralized(),
    "local_sgd": LocalSGD(communication_interval=1000),
    "async": AsyncModelAverage(sync_interval_ms=1e9),
    "zero_one_adam": ZeroOneAdam(codec="minmax_uint8"),  # in the middle of an interval of two steps
}


def make_optimizer(algorithm: bagua.Algorithm, params: Any) -> torch.optim.Optimizer:
    """One whose steps change nothing."""
    if isinstance(algorithm, ZeroOneAdam):
        return bagua.optim.ZeroOneAdam(params, lr=0.0, var_freeze_step=1, local_step_scaler=2, local_step_clipper=2)
    return torch.optim.SGD(params, lr=0.0)


class Averaging(Script):
    """Ranks that hold different weights and average them, of which one is lost at a point and another one holds.

    Attributes:
        blocked_s: how long they wait for each other.
        trains_on: steps are made afterwards, until the members have changed; they change nothing.
    """

    def __init__(self, store: str, place: int, dies: int, holds: int | None, trains_on: bool = False) -> None:
        super().__init__(store, place, dies, holds)
        self.trains_on, self.blocked_s = trains_on, 600.0
        self.members = SharedMembership(self.names, store, lambda *_: None)  # only the points below count

    def train(self, team: Any, algorithm: Any, make_optimizer: Any) -> dict[str, Any] | None:
        """One rank. Its weights become its own number, times 4, and then the mean."""
        self.here.name = name = self.names[team.rank]
        model = nn.Linear(SIZE, 1, bias=False)
        optimizer = make_optimizer(algorithm, model.parameters())
        options = bagua.FaultTolerance(seat=self.members.seat(name), open_timeout_s=600, max_blocked_s=self.blocked_s)
        bagua.distribute(model, optimizer, algorithm, fault_tolerant=options)
        try:
            for _ in range(4):
                model(torch.ones(1, SIZE)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                model.weight.fill_(4.0 * team.rank)
            bagua.average_parameters(model)
            self.event(name, "done")
            while self.trains_on and not bagua.stats(model).membership:
                model(torch.ones(1, SIZE)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except Killed:
            self.members.lose(name)
            drop_rank(model)
            return None
        ended = {"weights": model.weight.detach().clone()[0], "changes": bagua.stats(model).membership}
        bagua.detach(model)
        return ended


def run(monkeypatch: pytest.MonkeyPatch, script: Averaging, algorithm: bagua.Algorithm) -> list[torch.Tensor]:
    """Return the weights with which the survivors end."""
    await_all, exchange = mean.await_all, Replicas.exchange

    def await_at(manager: RecoveryManager, team: Team, point: str) -> None:
        script.event(script.here.name, point.rpartition("/")[2])
        await_all(manager, team, point)
        if script.here.name == script.names[script.holder] and point.endswith("end") and script.holds == POINTS:
            script.event(script.here.name, "left in doubt")
            raise CommunicationError("the store is lost")

    def exchange_at(replicas: Replicas) -> None:
        script.event(script.here.name, "exchange")
        exchange(replicas)

    monkeypatch.setattr(mean, "await_all", await_at)
    monkeypatch.setattr(Replicas, "exchange", exchange_at)
    return [end["weights"] for end in run_teams(SIZE, script.train, algorithm, make_optimizer) if end is not None]


def all_equal(weights: torch.Tensor, value: float, atol: float = 1e-3) -> bool:
    return torch.allclose(weights, torch.full((SIZE,), value), atol=atol)


@pytest.mark.parametrize(("name", "dies", "place"), one_in(2, ALGORITHMS, range(POINTS), [0, 2]))
def test_a_rank_is_lost(monkeypatch: pytest.MonkeyPatch, store: str, name: str, dies: int, place: int) -> None:
    """It has not said that it has the mean, so those that are left take theirs."""
    first, second = run(monkeypatch, Averaging(store, place, dies, None), ALGORITHMS[name])
    left = [rank for rank in range(SIZE) if rank != place]
    assert all_equal(first, 4.0 * sum(left) / len(left)) and torch.equal(first, second)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "zero_one_adam"])  # its interval ends
def test_one_survivor_does_not_learn_that_the_mean_counts(
    monkeypatch: pytest.MonkeyPatch, store: str, name: str
) -> None:
    """The other one is done, and trains on. It says so when the next groups are opened."""
    script = Averaging(store, 0, POINTS, POINTS, trains_on=True)
    first, second = run(monkeypatch, script, ALGORITHMS[name])
    assert all_equal(first, 4.0, atol=0.02) and all_equal(second, 4.0, atol=0.02)  # a step of 8 bits of 4


def test_equal_replicas_need_no_mean(monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    """Nobody waits for anybody."""
    script = Averaging(store, 0, POINTS + 1, None)
    ends = run(monkeypatch, script, GradientAllReduce())
    assert len(ends) == SIZE and all(all_equal(end, 4.0 * rank) for rank, end in enumerate(ends))
    assert not any("begin" in events for events in script.events.values())


def test_a_late_rank_is_named_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    script, original = Averaging(store, 0, POINTS + 2, None), Replicas.settle

    def settle(replicas: Replicas) -> bool:
        time.sleep(1.0 if script.here.name == script.names[2] else 0.0)
        return original(replicas)

    monkeypatch.setattr(Replicas, "settle", settle)
    monkeypatch.setattr(mean, "_PATIENCE_S", 0.2)
    ends = run(monkeypatch, script, ALGORITHMS["decentralized"])
    assert len(ends) == SIZE and all(all_equal(end, 4.0) for end in ends)
    told = [each.getMessage() for each in caplog.records if "still waiting" in each.getMessage()]
    assert len(told) == 2 and all("rank 2 did not arrive" in each for each in told)


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    script, original, others = Averaging(store, 0, POINTS + 2, None), Replicas.settle, []
    script.blocked_s = 1.0

    def settle(replicas: Replicas) -> bool:
        if script.here.name != script.names[2]:
            return original(replicas)
        deadline = time.monotonic() + 60
        while len(others) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        raise Killed

    def train(team: Any, *args: Any) -> None:
        try:
            script.train(team, *args)
        except CommunicationError as error:
            others.append(str(error))

    monkeypatch.setattr(Replicas, "settle", settle)
    run_teams(SIZE, train, ALGORITHMS["decentralized"], make_optimizer)
    assert len(others) == 2 and all("bagua.average_parameters(): rank 2 did not arrive" in each for each in others)

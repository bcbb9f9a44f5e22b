"""Ranks that scale their losses: after a loss all of them have one scale again, and no step counts for it twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bagua
from bagua.engine.hooks import attachments
from tests.engine.membership_store import Killed, drop_rank
from tests.engine.shared_membership import SharedMembership
from tests.rank_threads import run_teams

SIZE, STEPS, FIRST = 3, 6, 8.0
LIMIT_S = 60
Act = Callable[["Ranks", int, str, int], None]


class Ranks:
    """Ranks that train with a scaler whose scale doubles after each two steps.

    Args:
        act: called with the rank, a point and the number of the attempt. Points: "start" and "finish", when the agent
            is asked; "forward", "backward" and "stepped", after a pass and after a step.
        overflows: attempts at which rank 1 has an infinite loss.
    """

    def __init__(self, store: str, name: str, act: Act | None = None, overflows: tuple[int, ...] = ()) -> None:
        self.names = [f"{name}{rank}" for rank in range(SIZE)]
        self.members = SharedMembership(self.names, store, self._asked)
        self.together = threading.Barrier(SIZE, timeout=LIMIT_S)
        self._act, self._overflows = act, overflows
        self._attempts = dict.fromkeys(self.names, 0)

    def _asked(self, name: str, what: str) -> None:
        self.at(self.names.index(name), what)

    def at(self, rank: int, point: str) -> None:
        """A rank has come to a point."""
        if self._act is not None:
            self._act(self, rank, point, self._attempts[self.names[rank]])

    def await_change(self) -> None:
        """Return when another epoch has been decided."""
        with self.members.changed:
            assert self.members.changed.wait_for(lambda: self.members.epoch.number > 1, LIMIT_S)

    def train(self, team: Any, algorithm: Any, make: Any = bagua.GradScaler) -> dict[str, Any] | None:
        """One rank; None if it was killed."""
        name, rank = self.names[team.rank], team.rank
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        kind = bagua.optim.QAdam if algorithm == "qadam" else torch.optim.Adam
        optimizer = kind(model.parameters(), lr=0.01)
        options = bagua.FaultTolerance(seat=self.members.seat(name), open_timeout_s=600)
        bagua.distribute(model, optimizer, algorithm, fault_tolerant=options)
        scaler = make("cpu", init_scale=FIRST, growth_interval=2)
        batches = torch.Generator().manual_seed(rank)
        ended: dict[str, Any] = {"scales": []}
        try:
            while bagua.stats(model).steps < STEPS:
                loss = model(torch.randn(5, 4, generator=batches)).square().mean()
                self.at(rank, "forward")
                if rank == 1 and self._attempts[name] in self._overflows:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                self.at(rank, "backward")
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                self.at(rank, "stepped")
                scaler.update()
                optimizer.zero_grad()
                self._attempts[name] += 1
                ended["scales"].append(scaler.get_scale())
        except Killed:
            self.members.lose(name)
            drop_rank(model)
            return None
        stats = bagua.stats(model)
        ended |= {"weights": model.weight.detach().clone(), "state": scaler.state_dict(), "changes": stats.membership}
        ended |= {"steps": stats.steps, "launches": stats.total.launches, "attempts": self._attempts[name]}
        bagua.detach(model)
        return ended

    def run(self, algorithm: Any = "gradient_allreduce") -> list[dict[str, Any]]:
        """Train on all; returns what those end with that were not killed."""
        return [end for end in run_teams(SIZE, self.train, algorithm) if end is not None]


def check_alike(ends: list[dict[str, Any]], counted: int = STEPS, halved: int = 0) -> None:
    """All have the same weights, and the scale that `counted` steps without an overflow and `halved` with one make."""
    for end in ends:
        assert end["steps"] == STEPS and torch.equal(end["weights"], ends[0]["weights"])
        assert end["state"] == ends[0]["state"]
    assert ends[0]["state"]["scale"] == FIRST * 2.0 ** (counted // 2 - halved)
    assert ends[0]["state"]["_growth_tracker"] == counted % 2


@pytest.mark.parametrize(
    ("point", "algorithm"), [("start", "gradient_allreduce"), ("backward", "bytegrad"), ("finish", "qadam")]
)
def test_a_lost_step_leaves_the_scale(store: str, point: str, algorithm: str) -> None:
    """At "start" the others' backward pass fails, at "finish" the mean has come, but does not count."""

    def act(ranks: Ranks, rank: int, where: str, attempt: int) -> None:
        if attempt != 3:
            return
        if point == "start" and where == ("start" if rank == 2 else "forward"):
            ranks.together.wait(LIMIT_S)  # the others have begun the step
        if rank == 2 and where == point:
            raise Killed
        if rank != 2 and where == "finish" and point != "start":
            ranks.await_change()

    ends = Ranks(store, f"{point}-{algorithm}", act).run(algorithm)
    assert len(ends) == 2
    check_alike(ends)
    assert [end["attempts"] for end in ends] == [STEPS + 1] * 2, "one step was lost"
    assert ends[0]["scales"][3] == ends[0]["scales"][2], "in it the scale stayed"


def fail(ranks: Ranks, rank: int) -> None:
    """Lose the step in progress of one rank, whose groups are cut."""
    managers = [m for each in attachments.all() if (m := each.engine.failures.recovery) is not None]
    next(m for m in managers if m.seat.name == ranks.names[rank]).exchange_failed("a test")


def test_an_overflow_that_only_some_ranks_have_seen(store: str) -> None:
    """Ranks 0 and 2 skip the step and halve the scale; rank 1 loses it. Then all have one scale."""

    def act(ranks: Ranks, rank: int, where: str, attempt: int) -> None:
        if where == "backward" and attempt == 2:
            ranks.together.wait(LIMIT_S)
            if rank == 1:
                fail(ranks, 1)

    ends = Ranks(store, "seen", act, overflows=(2,)).run()
    check_alike(ends, halved=1)  # as rank 0 has it, which leads
    assert [end["scales"][2] for end in ends] == [8.0, 16.0, 8.0], "the test shows something"


def test_a_rank_that_lacks_a_step_gets_the_scale_with_the_weights(store: str) -> None:
    def act(ranks: Ranks, rank: int, where: str, attempt: int) -> None:
        if attempt == 2 and where == ("backward" if rank == 1 else "stepped"):
            ranks.together.wait(LIMIT_S)  # the others have applied it
            if rank == 1:
                fail(ranks, 1)

    check_alike(Ranks(store, "lacks", act).run())


def test_local_steps_that_overflow_count_and_wait_for_nobody(store: str) -> None:
    algorithm = bagua.algorithms.LocalSGD(communication_interval=3)
    ends = Ranks(store, "local", overflows=(1, 3)).run(algorithm)
    assert [end["steps"] for end in ends] == [end["attempts"] for end in ends] == [STEPS] * SIZE
    assert all(torch.equal(end["weights"], ends[0]["weights"]) for end in ends)
    assert [end["launches"] for end in ends] == [STEPS // 3] * SIZE, "only the two averages"
    assert ends[0]["scales"] == ends[2]["scales"] == [8.0, 16.0, 16.0, 32.0, 32.0, 64.0]
    assert ends[1]["scales"] == [8.0, 4.0, 4.0, 2.0, 2.0, 4.0]


def test_local_steps_after_a_loss_keep_the_scale_of_each_rank(store: str) -> None:
    def act(ranks: Ranks, rank: int, where: str, attempt: int) -> None:
        if where == "stepped" and attempt == 3:
            ranks.together.wait(LIMIT_S)  # the first average counts on all
            if rank == 2:
                raise Killed

    ends = Ranks(store, "each", act, overflows=(1,)).run(bagua.algorithms.LocalSGD(communication_interval=3))
    assert [end["steps"] for end in ends] == [STEPS] * 2 and torch.equal(ends[0]["weights"], ends[1]["weights"])
    assert [end["scales"][-1] for end in ends] == [64.0, 16.0]


def test_the_scaler_of_torch_is_refused_at_its_first_step(store: str) -> None:
    ranks = Ranks(store, "plain")
    with pytest.raises(AssertionError, match=r"fault_tolerant: torch\.amp\.GradScaler .* use bagua\.GradScaler"):
        run_teams(SIZE, ranks.train, "gradient_allreduce", torch.amp.GradScaler)


def test_ranks_that_average_now_and_then_are_refused(store: str) -> None:
    def train(team: Any) -> None:
        model = nn.Linear(4, 3)
        optimizer = bagua.optim.ZeroOneAdam(model.parameters(), lr=0.01)
        seat = ranks.members.seat(ranks.names[team.rank])
        bagua.distribute(model, optimizer, "zero_one_adam", fault_tolerant=bagua.FaultTolerance(seat=seat))
        scaler = bagua.GradScaler("cpu")
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        with pytest.raises(RuntimeError, match="'zero_one_adam' averages gradients in some steps and not in others"):
            scaler.step(optimizer)
        bagua.detach(model)

    ranks = Ranks(store, "sometimes")
    run_teams(SIZE, train)


def test_two_scalers_are_refused(store: str) -> None:
    def train(team: Any) -> None:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        seat = ranks.members.seat(ranks.names[team.rank])
        bagua.distribute(model, optimizer, "gradient_allreduce", fault_tolerant=bagua.FaultTolerance(seat=seat))
        of_another_model, scaler, second = (bagua.GradScaler("cpu", init_scale=each) for each in (2.0, 4.0, 8.0))
        of_another_model.scale(torch.ones(()))
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        scaler.step(optimizer)
        second.scale(model(torch.ones(1, 4)).sum()).backward()
        with pytest.raises(RuntimeError, match="two GradScalers scale losses of the module"):
            second.step(optimizer)
        recovery = attachments[model].engine.failures.recovery
        assert recovery is not None
        state = recovery.loss_scale.report()
        assert state is not None and state["scale"] == 4.0
        bagua.detach(model)

    ranks = Ranks(store, "two")
    run_teams(SIZE, train)

"""Decoupled DiLoCo: uneven steps against a numpy oracle; a quorum moves the anchor, no rank alone; nobody waits."""

from __future__ import annotations

import gc
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import bagua
from bagua.algorithms import Warmup
from bagua.comm.team import Team
from bagua.contrib import DecoupledDiLoCo
from bagua.contrib.decoupled_rounds import Merging, Outer, SharedRounds
from bagua.engine.lanes.dispatcher import Dispatcher
from bagua.exchanges import AllReduce
from tests.algorithms.quadratic import N, Quadratic, flat, start, target
from tests.contract.decoupled_run import LR, PATIENCE_S, Run, Script, wait_for
from tests.rank_threads import run_teams

H = 4
OUTER = {"outer_lr": 0.6, "outer_momentum": 0.4}
# In turns: a rank and its inner steps, or the members of the round that closes then, with their steps.
PLAN: list[Any] = [
    (1, 6),
    (2, 1),
    (0, 4),
    {0: 4, 1: 6},
    (1, 2),
    (2, 6),
    (0, 4),
    {0: 4, 2: 7},
    "resume",
    (0, 1),
    (2, 1),
    (1, 3),
    (2, 3),
    {1: 5, 2: 4},
    (0, 1),
    (1, 1),
    (2, 1),
]


class Oracle:
    """The formula, in fp64, of ranks that take turns."""

    def __init__(self, tokens: list[int], nesterov: bool) -> None:
        ranks = range(len(tokens))
        self.a, self.v, self.nesterov, self.tokens = start(), np.zeros(N), nesterov, tokens
        self.x = [start() for _ in ranks]
        self.seen = [start() for _ in ranks]  # the anchor that a rank has adopted
        self.owed = [np.zeros(N) for _ in ranks]  # contributed since
        self.made = [0 for _ in ranks]

    def train(self, rank: int, steps: int) -> None:
        for _ in range(steps):
            self.x[rank] = self.x[rank] - LR * (self.x[rank] - target(rank, self.made[rank]))
            self.made[rank] += 1
            self.x[rank] = self.x[rank] + (self.a - self.seen[rank]) - self.owed[rank]
            self.seen[rank], self.owed[rank] = self.a.copy(), np.zeros(N)

    def merge(self, members: dict[int, int]) -> None:
        learnt = {rank: self.x[rank] - self.seen[rank] for rank in members}
        weights = {rank: steps * self.tokens[rank] for rank, steps in members.items()}
        d = -sum(weights[rank] * learnt[rank] for rank in members) / sum(weights.values())
        lr, mu = OUTER["outer_lr"], OUTER["outer_momentum"]
        self.v = mu * self.v + d
        self.a = self.a - lr * (d + mu * self.v if self.nesterov else self.v)
        for rank in members:
            self.owed[rank] = learnt[rank]


@pytest.mark.parametrize(
    ("tokens", "nesterov", "resume"), [((0, 0, 0), True, False), ((3, 1, 2), False, False), ((3, 1, 2), True, True)]
)
def test_uneven_steps_are_merged_as_the_oracle_does(tokens: tuple[int, ...], nesterov: bool, resume: bool) -> None:
    each_step = [number or 1 for number in tokens]
    oracle, plan, turns = Oracle(each_step, nesterov), [], []
    for entry in PLAN:
        if isinstance(entry, dict):
            plan.append(entry)
            oracle.merge(entry)
            turns.append((None, partial(Run.await_rounds, number=len(plan))))
        elif isinstance(entry, tuple):
            oracle.train(*entry)
            turns.append((entry[0], partial(Run.train, steps=entry[1])))
        elif resume:
            turns.append((None, Run.resume))
    script = Script(3, turns)
    merged = sum(steps * each_step[rank] for members in plan for rank, steps in members.items())

    def rank_main(team: Team) -> tuple[np.ndarray, np.ndarray, list[list[float]], bagua.Stats]:
        options = {**OUTER, "nesterov": nesterov, "grace": 0.0, "communication_interval": H}
        run = Run(team, tokens[team.rank], **options)
        script.play(run)
        return run.x(), run.anchor(), run.offers, bagua.stats(run.model)

    results = run_teams(3, rank_main)
    for rank, (x, anchor, offers, stats) in enumerate(results):
        assert offers == [[float(members.get(each, 0)) for each in range(3)] for members in plan]
        assert np.abs(anchor - oracle.a).max() < 1e-5
        assert np.abs(x - oracle.x[rank]).max() < 1e-5
        assert np.array_equal(anchor, results[0][1])
        assert stats.extra["members"].mean == 2 and stats.extra["merged"].last == merged
        assert np.abs(anchor - start()).max() > 0.1


def test_a_rank_that_stands_still_delays_neither_steps_nor_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step, for six rounds of the others; then all of its steps are merged."""
    resumed, merged = threading.Event(), threading.Event()
    waited: list[bool] = []
    wait = Dispatcher.wait

    def watched(dispatcher: Dispatcher, ticket: Any = None) -> None:
        waited.append(ticket is not None and not ticket.done)
        wait(dispatcher, ticket)

    def rank_main(team: Team) -> tuple[list[str], list[list[float]], float]:
        run = Run(team, communication_interval=H, grace=0.0)
        monkeypatch.setattr(Dispatcher, "wait", watched)
        if team.rank == 3:
            run.train(3)
            run.await_rounds(6)
            resumed.set()
            # A round's offers are noted before its exchange, its digest after it.
            run.train_until(lambda: any(offer[3] for offer in run.offers[: len(run.shared.digests)]))
            merged.set()
        else:
            run.train_until(lambda: merged.is_set() and len(run.shared.digests) > 6)
        behind = bagua.stats(run.model).extra["behind_steps"].max
        return run.shared.digests, run.offers, behind

    results = run_teams(4, rank_main)
    assert not any(waited), "a training thread waited for an exchange under way"
    # A rank may have ended between the two notes on its last round.
    least = min(len(notes) for digests, offers, _ in results for notes in (digests, offers))
    assert least > 6
    for digests, offers, _ in results:
        assert digests[:least] == results[0][0][:least] and offers[:least] == results[0][1][:least]
        for number, offer in enumerate(offers):
            assert sum(steps >= H for steps in offer) >= 3  # a majority
            assert number >= 6 or offer[3] == 0
    assert len(set(results[0][0])) == len(results[0][0])
    first = next(offer[3] for offer in results[3][1] if offer[3])
    assert first >= H  # the three steps made before, too


@pytest.mark.parametrize("quorum", [None, 3])
def test_fewer_than_the_quorum_do_not_move_the_anchor(quorum: int | None) -> None:
    """One of three alone, or two where three are asked for; their steps count once the others are there."""
    few = 1 if quorum is None else 2
    tried, last = threading.Barrier(3), threading.Barrier(3)

    def rank_main(team: Team) -> tuple[str, str, int, list[list[float]], float]:
        run = Run(team, communication_interval=H, quorum=quorum)
        before, ahead = run.shared.digest(), team.rank < few
        if ahead:
            run.train(3 * H)
            assert run.shared.ready()
            run.train(10 * H)
        tried.wait(PATIENCE_S)
        alone, rounds = run.shared.digest(), run.shared.rounds
        moved = float(np.abs(run.x() - start()).max())
        last.wait(PATIENCE_S)
        if not ahead:
            run.train(H)
        run.await_rounds(1)
        return before, alone, rounds, run.offers, moved if ahead else 1.0

    for before, alone, rounds, offers, moved in run_teams(3, rank_main):
        assert before == alone and rounds == 0 and moved > 0.1
        assert offers[0][0] == 13 * H and sum(steps > 0 for steps in offers[0]) >= (quorum or 2)


def test_grace_keeps_a_round_open_and_min_steps_takes_those_who_have_begun() -> None:
    def rank_main(team: Team, options: dict[str, Any], script: Script) -> list[list[float]]:
        run = Run(team, communication_interval=H, **options)
        script.play(run)
        return run.offers

    turns: Any = [(0, lambda run: run.train(5)), (1, lambda run: run.train(4)), (2, lambda run: run.train(4))]
    ends: Any = [(None, lambda run: run.await_rounds(1))]
    for offers in run_teams(3, rank_main, {"grace": 1e9}, Script(3, turns + ends)):
        assert offers == [[5.0, 4.0, 4.0]]
    early: Any = [(2, lambda run: run.train(2)), turns[0], turns[1]]
    for offers in run_teams(3, rank_main, {"grace": 0.0, "min_steps": 1}, Script(3, early + ends)):
        assert offers == [[5.0, 4.0, 2.0]]


def test_ranks_saved_between_different_rounds_go_on_with_the_latest_anchor() -> None:
    together = threading.Barrier(3)

    def rank_main(team: Team) -> tuple[list[str], int, float, np.ndarray]:
        run = Run(team, communication_interval=H, grace=0.0)
        early = None
        if team.rank == 2:
            run.train(1)
            early = bagua.state_dict(run.model), {name: each.clone() for name, each in run.model.state_dict().items()}
        together.wait(PATIENCE_S)
        run.train(H if team.rank < 2 else 1)
        run.await_rounds(1)
        together.wait(PATIENCE_S)
        saved, weights = early or (bagua.state_dict(run.model), run.model.state_dict())
        old = run.model
        run._distribute()
        run.model.load_state_dict(weights)
        bagua.load_state_dict(run.model, saved)
        bagua.detach(old)
        together.wait(PATIENCE_S)
        run.train(H if team.rank < 2 else 1)
        run.await_rounds(2)
        together.wait(PATIENCE_S)
        run.train(1)
        # What this rank has learnt is what its weights are beyond the anchor.
        learnt = run.x() - run.anchor()
        return run.shared.digests, run.shared.rounds, run.shared.merged, learnt

    results = run_teams(3, rank_main)
    for digests, rounds, merged, learnt in results:
        assert digests == results[0][0] and rounds == 2 and merged == 4.0 * H
        assert np.abs(learnt).max() < 2.0


def test_the_average_at_the_end_and_a_rank_that_leaves() -> None:
    """All hold the same weights after an average; then the others name the rank that has left."""
    averaged = threading.Barrier(3)

    def rank_main(team: Team) -> tuple[np.ndarray, str, tuple[str, ...]]:
        run = Run(team, communication_interval=H, max_alone_s=0.5)
        run.train_until(lambda: run.shared.rounds >= 2)
        averaged.wait(PATIENCE_S)
        bagua.average_parameters(run.model)
        x = run.x()
        averaged.wait(PATIENCE_S)
        if team.rank == 1:
            bagua.detach(run.model)
            return x, "rank 1 has left", ()
        try:
            run.train_until(lambda: False)
        except bagua.CommunicationError as error:
            return x, str(error), bagua.stats(run.model).notices
        return x, "no error", ()

    results = run_teams(3, rank_main)
    for rank, (x, message, notices) in enumerate(results):
        assert np.array_equal(x, results[0][0])
        assert "rank 1 has left" in message
        assert rank == 1 or ("no exchange for" in message and "rank 1 has left" in notices[0])


def test_an_exchange_that_breaks_is_raised_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run_whole = AllReduce.run

    def broken(self: AllReduce, x_N: torch.Tensor, state: Any, groups: Any, step: int) -> None:
        if groups.rank == 0 and step == 1 and threading.current_thread().name == "bagua-lane":
            raise ZeroDivisionError("deliberate")
        run_whole(self, x_N, state, groups, step)

    def rank_main(team: Team) -> str:
        run = Run(team, communication_interval=H)
        run.train_until(lambda: run.shared.rounds >= 1)
        try:
            run.train_until(lambda: False)
        except bagua.CommunicationError as error:
            return str(error)
        return "no error"

    monkeypatch.setattr(AllReduce, "run", broken)
    first, second = run_teams(2, rank_main)
    assert "ZeroDivisionError: deliberate" in first and "rank 1" in second


def test_tokens_must_be_counted_by_all() -> None:
    def rank_main(team: Team) -> str:
        run = Run(team, tokens=2 if team.rank == 0 else 0, communication_interval=H)
        try:
            run.train_until(lambda: False)
        except bagua.CommunicationError as error:
            return str(error)
        return "no error"

    for message in run_teams(2, rank_main):
        assert "count_tokens: not called on rank 1" in message


def test_weights_of_16_bits_lose_nothing_of_small_steps() -> None:
    shared = SharedRounds(
        Outer(AllReduce(), H, H, 1.0, 0.0, False),
        [Merging(torch.ones(3), None, torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16), {})],
        torch.zeros(4, dtype=torch.float64),
    )
    bucket: Any = SimpleNamespace(flat=torch.ones(3, dtype=torch.bfloat16))
    for _ in range(100):
        shared.merging[0].pull.add_(1e-3)  # less than bf16 tells from 1
        shared.pending = True
        shared.adopt([bucket])
    assert (bucket.flat.float() + shared.merging[0].pull - 1.1).abs().max() < 1e-5
    assert (bucket.flat.float() - 1.1).abs().max() < 0.01


def test_one_rank_alone_in_the_job_is_plain_training_with_outer_steps() -> None:
    oracle = Oracle([1], nesterov=True)
    for _ in range(2):
        oracle.train(0, H)
        oracle.merge({0: H})
        oracle.x[0] = oracle.x[0] + (oracle.a - oracle.seen[0]) - oracle.owed[0]
        oracle.seen[0], oracle.owed[0] = oracle.a.copy(), np.zeros(N)

    def rank_main(team: Team) -> np.ndarray:
        run = Run(team, communication_interval=H, **OUTER)
        run.train(2 * H)
        return run.x()

    assert np.abs(run_teams(1, rank_main)[0] - oracle.x[0]).max() < 1e-5


def test_after_a_warm_up_rounds_begin() -> None:
    def rank_main(team: Team) -> tuple[np.ndarray, int, float]:
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        algorithm = Warmup(2, "gradient_allreduce", DecoupledDiLoCo(communication_interval=2, codec="bf16"))
        bagua.distribute(model, optimizer, algorithm, process_group=team)
        while "members" not in bagua.stats(model).extra:
            model(torch.tensor(target(team.rank, 0), dtype=torch.float32)).backward()
            optimizer.step()
            optimizer.zero_grad()
        bagua.average_parameters(model)
        return flat(model).detach().numpy().copy(), bagua.stats(model).steps, bagua.stats(model).extra["members"].mean

    for x, steps, members in (results := run_teams(2, rank_main)):
        assert np.array_equal(x, results[0][0]) and np.isfinite(x).all()
        assert steps >= 4 and members == 2


def test_a_dropped_module_ends_its_lane() -> None:
    def lanes() -> int:
        return sum(thread.name == "bagua-lane" for thread in threading.enumerate())

    before = lanes()

    def rank_main(team: Team) -> None:
        run = Run(team, communication_interval=H)
        run.train(3 * H if team.rank == 0 else 1)
        del run

    run_teams(2, rank_main)
    wait_for(lambda: _collected() and lanes() <= before)


def _collected() -> bool:
    gc.collect()
    return True

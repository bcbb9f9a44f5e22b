"""Asynchronous model averaging: it mixes, it never moves the mean, and nobody ever waits for anybody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import bagua
import bagua.engine.lanes.pool
from bagua.comm.team import Team
from bagua.engine.lanes.dispatcher import Dispatcher
from tests.algorithms.async_run import LR, PATIENCE_S, Run, events, together
from tests.algorithms.quadratic import N, Quadratic, start, target, targets
from tests.rank_threads import run_teams


@pytest.mark.parametrize(
    ("size", "nodes", "hierarchical"),
    [
        (1, None, False),
        (2, None, False),
        (3, None, False),
        (4, [0, 0, 0, 1], True),
        (4, [0, 0, 1, 1], False),
        (3, [0, 1, 1], True),
    ],
)
def test_it_mixes_and_keeps_the_mean(size: int, nodes: list[int] | None, hierarchical: bool) -> None:
    """After the last round the mean of all ranks is what their own gradients made of it, in fp32."""

    def rank_main(team: Team) -> tuple[np.ndarray, np.ndarray, bagua.Stats, np.ndarray]:
        run = Run(team, hierarchical=hierarchical, bucket_bytes=16)
        if size == 1:
            run.train(5)
        else:
            run.train_rounds(10)
        bagua.pause(run.model)
        x, stats = run.x(), bagua.stats(run.model)
        bagua.average_parameters(run.model)
        equal = run.x()
        bagua.detach(run.model)
        assert np.array_equal(equal, run.x())
        return x, run.local(), stats, equal

    results = run_teams(size, rank_main, nodes=nodes)
    x, local = (np.stack([result[i] for result in results]) for i in (0, 1))
    assert np.abs(x.mean(0) - local.mean(0)).max() < 2e-5
    for _, _, stats, equal in results:
        assert np.array_equal(equal, results[0][3])
        assert np.abs(equal - local.mean(0)).max() < 2e-5
        assert not stats.notices
        if size > 1:
            assert stats.num_buckets > 1
            assert stats.extra["round_s"].count == results[0][2].extra["round_s"].count >= 10
            staleness = stats.extra["staleness_steps"]
            assert 1 <= staleness.mean <= staleness.max <= stats.steps
            assert stats.total.bytes_sent > 0 and stats.total.comm_s > 0
    if size > 1:
        # Apart by the steps since the last snapshot only, however many came before.
        stale = sum(stats.extra["staleness_steps"].max + 1 for _, _, stats, _ in results)
        steps = [stats.steps for _, _, stats, _ in results]
        longest = max(np.abs(target(rank, step) + rank).max() for rank in range(size) for step in range(max(steps)))
        assert np.abs(x - x.mean(0)).max() <= LR * longest * (2 * stale + max(steps) - min(steps))


def test_consensus_is_bounded() -> None:
    """The ranks drift apart by LR sqrt(N) per step; the distance stays that of a few steps, not of all."""

    def rank_main(team: Team) -> tuple[np.ndarray, int, float]:
        run = Run(team)
        run.train_until(lambda: run.rounds >= 30 and run.steps >= 200)
        bagua.pause(run.model)
        return run.x(), run.steps, bagua.stats(run.model).extra["staleness_steps"].max

    results = run_teams(2, rank_main)
    steps = max(steps for _, steps, _ in results)
    stale = max(stale for *_, stale in results)
    bound = LR * 3 * np.sqrt(N) * (2 * stale + abs(results[0][1] - results[1][1]) + 2)
    assert np.linalg.norm(results[0][0] - results[1][0]) < bound
    assert steps >= 200


def test_loss_falls_to_that_of_the_mean() -> None:
    def rank_main(team: Team) -> np.ndarray:
        run = Run(team, Quadratic)
        run.data = lambda: torch.tensor(target(team.rank, 0), dtype=torch.float32)  # type: ignore[method-assign]
        run.train_until(lambda: run.rounds >= 40 and run.steps >= 800, 0.0005)
        bagua.average_parameters(run.model)
        return run.x()

    x = run_teams(2, rank_main)[0]
    optimum = targets(2, 0).mean(0)
    assert np.linalg.norm(x - optimum) < 0.2 * np.linalg.norm(start() - optimum)


def test_nobody_waits_for_a_straggler(monkeypatch: pytest.MonkeyPatch) -> None:
    ready, finished = together(3), threading.Event()

    def rank_main(team: Team) -> tuple[int, bagua.Stats]:
        run = Run(team)
        monkeypatch.setattr(Dispatcher, "wait", watched)
        run.train(1)
        ready()
        if team.rank == 2:
            while run.steps < 20 or run.rounds < 7:  # the others are far ahead before each step
                assert wait_for(lambda: min(made[:2]) > 2 * run.steps)
                run.train(1)
            finished.set()
        else:
            while not finished.is_set():
                run.train(1, 0.001)
                made[team.rank] = run.steps
        return run.steps, bagua.stats(run.model)

    def wait_for(what: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while not what() and time.monotonic() < deadline:
            time.sleep(0.001)
        return what()

    def watched(dispatcher: Dispatcher, ticket: Any = None) -> None:
        waited.append(ticket is not None and not ticket.done)
        wait(dispatcher, ticket)

    made, waited, wait = [0, 0], [], Dispatcher.wait

    results = run_teams(3, rank_main)
    (fast, _), (_, _), (slow, _) = results
    assert slow >= 20 and fast > 2 * (slow - 1)
    assert waited and not any(waited), "a training thread waited for an exchange under way"
    for _, stats in results:
        assert stats.extra["round_s"].count >= 5


def test_evaluation_accumulation_and_loose_forward_passes() -> None:
    """The traps of an implementation that takes a lock in forward and gives it back in backward."""
    evaluated, ready, first, last = threading.Event(), together(2), events(2), events(2)

    def rank_main(team: Team) -> tuple[np.ndarray, np.ndarray]:
        run = Run(team)
        run.train_rounds(2)
        for _ in range(3):
            run.model(run.data())  # in training mode, never followed by a backward pass
        with bagua.no_sync(run.model):
            run.train(2)
        run.train_rounds(2, first)
        ready()
        if team.rank == 0:
            run.model.eval()
            with torch.no_grad():
                for _ in range(20):
                    run.model(run.data())
                    time.sleep(0.01)
            run.model.train()
            evaluated.set()
        else:
            before = run.steps
            run.train_until(evaluated.is_set)
            assert run.steps > before + 5
        run.train_rounds(2, last)
        bagua.pause(run.model)
        return run.x(), run.local()

    results = run_teams(2, rank_main)
    x, local = (np.stack([result[i] for result in results]) for i in (0, 1))
    assert np.abs(x.mean(0) - local.mean(0)).max() < 2e-5

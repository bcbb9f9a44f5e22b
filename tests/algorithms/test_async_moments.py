"""Asynchronous model averaging: abort, resume, average, switching, warm-up and loading."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import bagua
import bagua.engine.lanes.pool
from bagua.algorithms import AsyncModelAverage, Warmup
from bagua.comm.team import Team
from tests.algorithms.async_run import LR, PATIENCE_S, Run, events, together
from tests.algorithms.quadratic import start, target, targets
from tests.rank_threads import _run, run_teams, teams


def test_abort_and_resume_at_different_steps() -> None:
    ready = together(2)

    def rank_main(team: Team) -> tuple[np.ndarray, np.ndarray, list[int]]:
        run, seen = Run(team), []
        for turn in range(2):
            run.train_rounds(3)
            run.train(1 + 3 * team.rank + turn)
            bagua.pause(run.model)
            seen.append(run.rounds)
            run.train(2 + 4 * (1 - team.rank))
            assert run.rounds == seen[-1], "nothing begins after abort"
            ready()
            bagua.resume(run.model)
            run.train(team.rank)
            if turn:
                bagua.resume(run.model)  # once more does nothing
        run.train_rounds(3)
        bagua.pause(run.model)
        bagua.pause(run.model)
        seen.append(run.rounds)
        ready()
        return run.x(), run.local(), seen

    (x0, local0, seen0), (x1, local1, seen1) = run_teams(2, rank_main)
    assert seen0 == seen1, "the ranks agree which rounds took place"
    assert np.abs((x0 + x1 - local0 - local1) / 2).max() < 2e-5


def test_one_rank_aborts_while_the_other_trains() -> None:
    resumed, enough, last = threading.Event(), threading.Event(), events(2)

    def rank_main(team: Team) -> int:
        run = Run(team)
        run.train_rounds(2)
        if team.rank == 0:
            bagua.pause(run.model)
            assert enough.wait(PATIENCE_S)
            bagua.resume(run.model)
            resumed.set()
        else:
            run.train(30)
            enough.set()
            run.train_until(resumed.is_set)
        run.train_rounds(2, last)
        return run.rounds

    assert all(rounds >= 4 for rounds in run_teams(2, rank_main))


def test_average_names_who_stays_away() -> None:
    failed, last = threading.Event(), events(2)

    def rank_main(team: Team) -> None:
        run = Run(team, max_alone_s=PATIENCE_S)  # rank 1 is alone for as long as rank 0 waits
        run.train_rounds(1)
        if team.rank == 0:
            with pytest.raises(
                bagua.CommunicationError,
                match=r"average_parameters\(\): rank 1 did not arrive within 5.*different numbers of steps or batches",
            ):
                bagua.average_parameters(run.model)
            failed.set()
        run.train_until(failed.is_set)
        run.train_rounds(2, last)

    _run(teams(2, timeout_s=5), rank_main, (), 120)


def test_switching_back_and_forth() -> None:
    """With rounds under way. In between replicas are equal, as gradient all-reduce has them."""

    def rank_main(team: Team) -> tuple[list[np.ndarray], int]:
        run, seen = Run(team), []
        for _ in range(2):
            run.train(5)
            bagua.average_parameters(run.model)
            run.train(3)
            bagua.distribute(run.model, run.optimizer, "gradient_allreduce")
            run.train(3)
            seen.append(run.x())
            bagua.distribute(run.model, run.optimizer, "async", sync_interval_ms=0)
            run.train_rounds(2)
        return seen, run.rounds

    (first, _), (second, _) = run_teams(2, rank_main)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("algorithm", ["option", "composition"])
def test_warmup_counts_training_steps_only(algorithm: str) -> None:
    steps, size = 6, 2
    chosen: Any = AsyncModelAverage(sync_interval_ms=1e6, warmup_steps=steps)
    if algorithm == "composition":
        chosen = Warmup(steps, "gradient_allreduce", AsyncModelAverage(sync_interval_ms=1e6))

    def rank_main(team: Team) -> list[np.ndarray]:
        run, seen = Run(team, algorithm=chosen), []
        for _ in range(steps + 2):
            run.train()
            seen.append(run.x())
            run.model.eval()
            for _ in range(3):
                run.model(run.data())
            run.model.train()
            run.model(run.data())
        assert not run.rounds or run.steps > steps
        return seen

    first, second = run_teams(size, rank_main)
    x = start()
    for step in range(steps):
        x = x - LR * (targets(size, step).mean(0) + 0.5)
        assert np.array_equal(first[step], second[step])
        assert np.abs(first[step] - x).max() < 1e-5
    assert not np.array_equal(first[steps], second[steps]), "from here on every rank steps alone"
    assert np.abs(second[steps] - second[steps - 1] + LR * (target(1, steps) + 1)).max() < 1e-5


def test_abort_during_warmup_holds_after_it() -> None:
    def rank_main(team: Team) -> None:
        run = Run(team, warmup_steps=3)
        run.train(1)
        bagua.pause(run.model)
        run.train(6)
        assert run.rounds == 0
        bagua.resume(run.model)
        run.train_rounds(2)
        assert bagua.stats(run.model).steps == run.steps

    run_teams(2, rank_main)


def test_loading_drops_the_round_under_way() -> None:
    loaded = threading.Event()

    def rank_main(team: Team) -> None:
        run = Run(team)
        if team.rank == 1:
            assert loaded.wait(PATIENCE_S)
        else:
            run.train(1)  # its snapshot waits for rank 1
            weights, state = {k: v.clone() for k, v in run.model.state_dict().items()}, bagua.state_dict(run.model)
            run.train(5)
            run.model.load_state_dict(weights)
            bagua.load_state_dict(run.model, state)
            run.steps, want = 1, run.x()
            assert bagua.stats(run.model).steps == 1
            bagua.pause(run.model)
            assert np.array_equal(run.x(), want)
            assert np.abs(want - run.local()).max() < 1e-5
            bagua.resume(run.model)
            loaded.set()
        run.train_rounds(2)

    run_teams(2, rank_main)

"""Asynchronous model averaging: ranks that leave, fail, come late or end, and processes that end."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import bagua
import bagua.engine.lanes.pool
from bagua.algorithms import AsyncModelAverage
from bagua.comm.team import Team
from bagua.exchanges import AllReduce
from tests.algorithms.async_run import PATIENCE_S, Run
from tests.rank_threads import run_teams


@pytest.mark.parametrize("hierarchical", [False, True])
def test_uneven_numbers_of_steps(hierarchical: bool) -> None:
    first_is_gone = threading.Event()

    def rank_main(team: Team) -> tuple[str, ...]:
        run = Run(team, hierarchical=hierarchical)
        run.train_rounds(2)
        if team.rank == 1:
            bagua.detach(run.model)
            first_is_gone.set()
            return ()
        assert first_is_gone.wait(PATIENCE_S)
        run.train_until(lambda: bool(bagua.stats(run.model).notices))
        run.train(20)
        notices = bagua.stats(run.model).notices
        bagua.detach(run.model)
        return notices

    results = run_teams(3, rank_main, nodes=[0, 0, 1])
    assert "rank 1 has left" in results[0][0] + results[2][0]


class Broken(AllReduce):
    """Fails on rank 0 after a few rounds."""

    def run(self, x_N, state, groups, step) -> None:
        if groups.rank == 0 and step >= 3:
            raise ZeroDivisionError("deliberate")
        super().run(x_N, state, groups, step)


class Fails(AsyncModelAverage):
    """Uses `Broken`."""

    exchange = Broken()  # pyright: ignore[reportAssignmentType]


def test_a_failed_exchange_is_told_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def rank_main(team: Team) -> tuple[tuple[str, ...], int]:
        run = Run(team, algorithm=Fails(sync_interval_ms=0))
        run.train_until(lambda: bool(bagua.stats(run.model).notices))
        run.train(5)
        after = run.rounds
        run.train(20)
        assert run.rounds == after
        return bagua.stats(run.model).notices, run.steps

    with caplog.at_level(logging.INFO, "bagua"):
        first, second = run_teams(2, rank_main)
    assert "ZeroDivisionError: deliberate" in first[0][0] and "continues without" in first[0][0]
    assert second[0]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert any("ZeroDivisionError" in record.getMessage() for record in warnings)


def test_a_rank_that_does_not_come_is_named_and_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bagua.engine.lanes.pool, "_PATIENCE_S", 0.1)
    named = threading.Event()

    def rank_main(team: Team) -> tuple[str, ...]:
        run = Run(team)
        if team.rank == 1:
            assert named.wait(PATIENCE_S)
        else:
            run.train_until(lambda: bool(bagua.stats(run.model).notices))
            named.set()
        run.train_rounds(2)
        return bagua.stats(run.model).notices

    assert "rank 1 did not arrive within 0.1 s; still waiting for it" in run_teams(2, rank_main)[0][0]


@pytest.mark.parametrize("how", ["stays away", "fails"])
def test_a_rank_that_is_left_alone_gives_up(how: str) -> None:
    """After `max_alone_s`, and names the rank."""

    def rank_main(team: Team) -> str:
        options = {"max_alone_s": 4.0 if how == "fails" else 1.0, "sync_interval_ms": 0}
        run = Run(team, algorithm=(Fails if how == "fails" else AsyncModelAverage)(**options))
        if team.rank == 1 and how == "stays away":
            gave_up.wait(PATIENCE_S)
            return "no response from rank 1"
        try:
            run.train_until(lambda: False)
        except bagua.CommunicationError as error:
            gave_up.set()
            return str(error)
        return "no error"

    gave_up = threading.Event()
    for message in run_teams(2, rank_main):
        assert "no exchange for" in message or how == "stays away"
        assert ("an exchange failed" if how == "fails" else "no response from rank 1") in message


def test_a_dropped_module_ends_its_lanes() -> None:
    def lanes() -> int:
        return sum(thread.name == "bagua-lane" for thread in threading.enumerate())

    gc.collect()
    before = lanes()

    def rank_main(team: Team) -> None:
        run = Run(team)
        if team.rank == 0:
            run.train(3)  # waits for rank 1 forever
        del run

    run_teams(2, rank_main)
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    while lanes() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.process
@pytest.mark.parametrize(
    "scenarios",
    [
        pytest.param(["together", "killed first", "raise"], id="everyday"),
        pytest.param(["decoupled together", "decoupled killed"], id="decoupled", marks=pytest.mark.slow),
        pytest.param(["plain together", "early", "detach", "killed"], id="others", marks=pytest.mark.slow),
    ],
)
def test_ends_of_processes(scenarios: list[str]) -> None:
    """Together, early, by detaching, killed, by an exception; with rounds in flight every time."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.algorithms.async_ranks", "2", *scenarios],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    trials = {trial["scenario"]: trial for trial in map(json.loads, done.stdout.splitlines())}
    want = {"killed": [0, 9], "killed first": [9, 0], "raise": [0, 1], "decoupled killed": [0, 9]}
    for scenario, trial in trials.items():
        assert trial["codes"] == want.get(scenario, [0, 0]), trial
        assert not any("terminate" in text for text in trial["stderr"]), trial
    assert list(trials) == scenarios
    for scenario in {"detach", "raise"} & trials.keys():
        how = "failed" if scenario == "raise" else "left"
        assert f"rank 1 has {how}; training continues" in trials[scenario]["stderr"][0]
    if "decoupled killed" in trials:  # between two rounds it is missed, within one the connection breaks
        raised = trials["decoupled killed"]["stderr"][0]
        assert "raised:" in raised and "rank 1" in raised.split("raised:")[1], raised
    if "raise" in trials:
        assert "training continues without" in trials["killed first"]["stderr"][1]
        assert "ValueError: boom" in trials["raise"]["stderr"][1]

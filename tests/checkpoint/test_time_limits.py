"""A checkpoint does not depend on settings that change no number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bagua
from bagua.algorithms import AsyncModelAverage, ByteGrad, Warmup
from bagua.checkpoint import CheckpointError, load, save
from bagua.comm.team import Team
from bagua.contrib import DecoupledDiLoCo
from tests.checkpoint.runs import Case, Run
from tests.rank_threads import run_teams

ASYNC, DECOUPLED = AsyncModelAverage(sync_interval_ms=0), DecoupledDiLoCo(communication_interval=2)


def before(team: Team, algorithm: Any, path: Path) -> dict[str, Any]:
    run = Run.start(Case(algorithm), team)
    run.train(range(3), team.rank)
    bagua.pause(run.model)
    save(path, run.objects, step=3, process_group=team)
    state = bagua.state_dict(run.model)
    bagua.detach(run.model)
    return state


def after(team: Team, algorithm: Any, path: Path, states: list[dict[str, Any]]) -> str:
    """The algorithm that trains on after loading in both ways, or the error."""
    run = Run.start(Case(algorithm), team)
    try:
        assert load(path, run.objects, process_group=team, rng=False) is not None
        if team.size == len(states):
            bagua.load_state_dict(run.model, states[team.rank])
        run.train(range(3, 5), team.rank)
        bagua.pause(run.model)
        return bagua.stats(run.model).algorithm
    except CheckpointError as error:
        with pytest.raises(ValueError, match="saved with algorithm"):
            bagua.load_state_dict(run.model, states[team.rank])
        return str(error)
    finally:
        bagua.detach(run.model)


@pytest.mark.parametrize(
    ("saved", "loaded", "ranks"),
    [
        (replace(ASYNC, max_alone_s=30.0), replace(ASYNC, max_alone_s=40.0), 2),
        (replace(ASYNC, max_alone_s=30.0), ASYNC, 3),
        (replace(ASYNC, warmup_steps=2), replace(ASYNC, warmup_steps=2, max_alone_s=40.0), 2),
        (replace(ASYNC, warmup_steps=4), replace(ASYNC, warmup_steps=4, max_alone_s=40.0), 2),
        (DECOUPLED, replace(DECOUPLED, max_alone_s=40.0), 2),
        (Warmup(2, ByteGrad(), ASYNC), Warmup(2, ByteGrad(), replace(ASYNC, max_alone_s=40.0)), 2),
    ],
)
def test_another_time_limit_is_loaded(saved: Any, loaded: Any, ranks: int, tmp_path: Path) -> None:
    states = run_teams(2, before, saved, tmp_path)
    for told in run_teams(ranks, after, loaded, tmp_path, states):
        assert "loaded into" not in told and ("max_alone_s=40.0" in told or loaded is ASYNC)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (replace(ASYNC, max_alone_s=30.0), replace(ASYNC, sync_interval_ms=10)),
        (DECOUPLED, replace(DECOUPLED, grace=0.2, max_alone_s=40.0)),
    ],
)
def test_what_changes_numbers_is_refused(saved: Any, loaded: Any, tmp_path: Path) -> None:
    states = run_teams(2, before, saved, tmp_path)
    for told in run_teams(2, after, loaded, tmp_path, states):
        assert "saved with algorithm" in told and "loaded into" in told

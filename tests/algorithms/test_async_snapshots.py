"""Asynchronous model averaging: snapshots of weights."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bagua
from bagua.algorithms import async_model_average
from bagua.comm.team import Team
from tests.algorithms.async_run import Run, together
from tests.rank_threads import run_teams


@pytest.mark.parametrize("codec", ["identity", "int4"])
def test_a_snapshot_holds_no_changes_within_a_step(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """The lanes come to their first round when the next step has moved the weights away, as SAM does."""
    meet, join, calls = together(4), async_model_average._join, itertools.count()

    def late(*args: Any) -> bool:
        if next(calls) >= 2:
            return join(*args)
        meet()
        joined = join(*args)
        meet()
        return joined

    monkeypatch.setattr(async_model_average, "_join", late)

    def rank_main(team: Team) -> None:
        run, far = Run(team, codec=codec), 1000.0 * (1 + team.rank)
        params: list[Tensor] = list(run.model.parameters())
        run.train()
        with bagua.no_sync(run.model):
            run.model(run.data()).backward()
        with torch.no_grad():
            torch._foreach_add_(params, far)
            meet()
            meet()
            torch._foreach_sub_(params, far)
        run.train_rounds(1)
        assert np.abs(run.x() - run.local()).max() < 10.0

    run_teams(2, rank_main)


def test_a_lane_that_fails_ends_averaging_and_not_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> bool:
        raise MemoryError("deliberate")

    monkeypatch.setattr(async_model_average, "_enter", fails)

    def rank_main(team: Team) -> None:
        run = Run(team)
        run.train_until(lambda: bool(bagua.stats(run.model).notices))
        assert "MemoryError: deliberate" in bagua.stats(run.model).notices[0]
        run.train(20)
        assert run.rounds == 0

    run_teams(2, rank_main)

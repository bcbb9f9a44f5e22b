"""Asynchronous model averaging: snapshots that the lane takes while the next step computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import bagua
from bagua.algorithms import async_model_average
from bagua.comm.team import Team
from tests.algorithms.async_run import Run
from tests.rank_threads import run_teams

SLOW_S = 0.2


def test_weights_do_not_change_under_a_slow_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[bool] = []
    threads: set[str] = set()
    take = async_model_average._take

    def slowly(this: Any, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        threads.add(threading.current_thread().name)
        begun = [weights.clone() for weights, _ in copies]
        time.sleep(SLOW_S)
        take(this, copies)
        whole.append(all(torch.equal(copy, was) for (_, copy), was in zip(copies, begun, strict=True)))

    monkeypatch.setattr(async_model_average, "_take", slowly)

    run_teams(2, lambda team: Run(team).train_rounds(2))
    assert threads == {"bagua-lane"}
    assert len(whole) >= 4
    assert all(whole)


def test_a_snapshot_that_fails_ends_averaging_and_not_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(this: Any, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        raise MemoryError("deliberate")

    monkeypatch.setattr(async_model_average, "_take", fails)

    def rank_main(team: Team) -> None:
        run = Run(team)
        run.train_until(lambda: bool(bagua.stats(run.model).notices))
        assert "MemoryError: deliberate" in bagua.stats(run.model).notices[0]
        run.train(20)
        assert run.rounds == 0

    run_teams(2, rank_main)

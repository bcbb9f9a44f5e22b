"""A checkpoint holds the choice; another number of ranks chooses anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bagua
from bagua.checkpoint import load, save
from tests.auto.training import FAST, compressed_is_fast, pretend, until_settled
from tests.autotune.training import Training, engine_of
from tests.rank_threads import run_teams


def objects(training: Training) -> dict[str, Any]:
    return {"model": training.model, "optimizer": training.optimizer}


def before(team: Any, path: Path) -> Any:
    training = Training(team, "auto")
    until_settled(training)
    training.steps(2)
    save(path, objects(training), step=training.made, process_group=team)
    return training.made, training.steps(3).weights


def after(team: Any, path: Path, made: int) -> Any:
    training = Training(team, "auto")
    assert load(path, objects(training), process_group=team, rng=False) is not None
    training.made = made
    loaded = bagua.explain(training.model).phase, engine_of(training).algorithm.name
    weights = training.steps(3).weights
    training.made = 0
    return loaded, weights, until_settled(training)


@pytest.mark.parametrize("size", [2, 3])
def test_the_choice_is_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    pretend(monkeypatch, compressed_is_fast)
    (made, weights), _ = run_teams(2, before, tmp_path / "saved")
    found = run_teams(size, after, tmp_path / "saved", made)
    for loaded, again, explained in found:
        assert loaded == ("settled" if size == 2 else "waiting", "bytegrad")
        assert explained.chosen == FAST
        assert explained.size == size
        assert torch.equal(again, weights if size == 2 else found[0][1])

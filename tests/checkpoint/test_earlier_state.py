"""State that earlier versions saved is loaded; what is not theirs is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import bagua
from bagua.comm.team import Team
from tests.checkpoint.runs import Run, cases
from tests.rank_threads import run_teams

STOP = 5


def load_with(team: Team, name: str) -> str:
    """The error, after a state has been loaded that has another tensor."""
    run = Run.start(cases()["feedback"], team)
    run.train(range(STOP), team.rank)
    run.settle()
    saved = copy.deepcopy(bagua.state_dict(run.model))
    for entry in saved["states"]:
        entry["tensors"] |= {name: torch.ones(16)}
    run.train(range(STOP, STOP + 1), team.rank)
    try:
        bagua.load_state_dict(run.model, saved)
    except ValueError as error:
        return str(error)
    finally:
        now = bagua.state_dict(run.model)
        bagua.detach(run.model)
    names = {key for entry in now["states"] for key in entry["tensors"]}
    kept = [
        (entry["tensors"]["residual"], other["tensors"]["residual"])
        for entry, other in zip(saved["states"], now["states"], strict=True)
    ]
    assert names == {"residual"} and all(torch.equal(*each) for each in kept)
    return ""


def test_two_ranks_load_what_they_saved_when_chunks_had_residuals() -> None:
    assert run_teams(2, load_with, "chunk_residual") == ["", ""]
    assert all("unexpected tensors" in error for error in run_teams(2, load_with, "others"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {}, r"not made by bagua.state_dict\(\), as it has no 'version'"),
        (lambda state: {**state, "version": 1}, "version 1, expected 3: another Bagua made it"),
    ],
)
def test_what_is_no_state_of_an_algorithm_is_told_from_one_of_another_version(change: Any, message: str) -> None:
    model = torch.nn.Linear(2, 2)
    bagua.distribute(model, torch.optim.SGD(model.parameters(), lr=1), "bytegrad", process_group=Team.alone())
    with pytest.raises(ValueError, match=message):
        bagua.load_state_dict(model, change(bagua.state_dict(model)))
    bagua.detach(model)

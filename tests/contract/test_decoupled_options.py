"""Decoupled DiLoCo: what is refused, and how it is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bagua
from bagua.comm.team import Team
from bagua.contrib import DecoupledDiLoCo, count_tokens
from tests.algorithms.quadratic import N, Quadratic
from tests.contract.members import CONTRIB_ALGORITHMS
from tests.rank_threads import run_teams

assert CONTRIB_ALGORITHMS["decoupled_diloco"] is DecoupledDiLoCo  # and no longer registered, where other tests look


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"communication_interval": 0}, ("communication_interval", "0")),
        ({"quorum": 1}, ("quorum", "1", "alone")),
        ({"quorum": 2.0}, ("quorum", "2.0")),
        ({"grace": -0.1}, ("grace", "-0.1")),
        ({"grace": float("inf")}, ("grace", "inf")),
        ({"min_steps": 0}, ("min_steps", "0")),
        ({"min_steps": 65}, ("min_steps", "65", "communication_interval=64")),
        ({"outer_lr": 0}, ("outer_lr", "0")),
        ({"outer_momentum": 1.0}, ("outer_momentum", "1")),
        ({"outer_momentum": 0.0}, ("nesterov", "outer_momentum")),
        ({"codec": "no such codec"}, ("no such codec",)),
        ({"codec": "top_k"}, ("top_k", "lost")),
        ({"max_alone_s": 0}, ("max_alone_s", "0")),
    ],
)
def test_bad_options(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        DecoupledDiLoCo(**options)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_quorum_of_more_ranks_than_there_are() -> None:
    def rank_main(team: Team) -> str:
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError) as error:
            bagua.distribute(model, optimizer, DecoupledDiLoCo(quorum=3), process_group=team)
        return str(error.value)

    assert run_teams(2, rank_main) == ["quorum: 3 ranks, but there are 2"] * 2


def test_simulation_refuses() -> None:
    with pytest.raises(ValueError, match="DecoupledDiLoCo.*time"):
        bagua.simulate(
            DecoupledDiLoCo(), ranks=2, model=Quadratic, loss=lambda model, rank, step: model(torch.zeros(N)), steps=1
        )


@pytest.mark.parametrize("number", [0, -1, float("nan"), True, "3"])
def test_bad_numbers_of_tokens(number: Any) -> None:
    optimizer = torch.optim.SGD(Quadratic().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="count_tokens: expected a number > 0"):
        count_tokens(optimizer, number)

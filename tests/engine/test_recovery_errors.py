"""Errors that are fed back outlive a change of the members."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagua.codecs import Int4
from bagua.engine.recovery import opened_groups
from bagua.engine.recovery.carry_errors import carry_errors
from bagua.exchanges import Exchange, Hierarchical, PowerSGD, ScatterGather
from tests.engine.test_recovery_arrivals import Arrival, check_ends
from tests.engine.test_recovery_nodes import RANKS
from tests.rank_threads import run_teams

INT4 = ScatterGather(Int4(), error_feedback=True)
LOW_RANK = PowerSGD(((8, 8),), rank=1)


def states(exchange: Exchange, name: str, *parts: list[float], bucket: int = 0) -> dict[Any, Any]:
    return {(exchange, bucket, part): {name: torch.tensor(values)} for part, values in enumerate(parts)}


@pytest.mark.parametrize("exchange", [INT4, Hierarchical(INT4)], ids=["flat", "hierarchical"])
def test_parts_may_be_others(exchange: Exchange) -> None:
    now = states(exchange, "residual", [0.0], [0.0, 0.0, 0.0])
    carry_errors(states(exchange, "residual", [1.0, 2.0], [3.0, 4.0]), now)
    assert [now[exchange, 0, part]["residual"].tolist() for part in (0, 1)] == [[1.0], [2.0, 3.0, 4.0]]


def test_buckets_are_kept_apart_and_what_is_no_error_begins_anew() -> None:
    old = {**states(LOW_RANK, "error", [1.0, 2.0]), **states(LOW_RANK, "error", [3.0], bucket=1)}
    now = {**states(LOW_RANK, "error", [0.0, 0.0]), **states(LOW_RANK, "error", [0.0], bucket=1)}
    for made, value in ((old, 7.0), (now, 5.0)):
        for state in made.values():
            state["right"] = torch.tensor([value])
    carry_errors(old, now)
    assert [each["error"].tolist() for each in now.values()] == [[1.0, 2.0], [3.0]]
    assert [each["right"].tolist() for each in now.values()] == [[5.0], [5.0]]


def test_the_error_of_an_owned_chunk_is_lost_with_its_place() -> None:
    old, now = states(INT4, "residual", [1.0]), states(INT4, "residual", [0.0])
    old[INT4, 0, 0]["chunk_residual"] = torch.tensor([9.0])
    now[INT4, 0, 0]["chunk_residual"] = torch.tensor([0.0])
    carry_errors(old, now)
    assert now[INT4, 0, 0]["chunk_residual"].item() == 0.0


def test_an_overflow_is_not_carried() -> None:
    now = states(INT4, "residual", [0.0, 0.0, 0.0, 0.0])
    carry_errors(states(INT4, "residual", [float("nan"), float("inf"), -float("inf"), 2.0]), now)
    assert now[INT4, 0, 0]["residual"].tolist() == [0.0, 0.0, 0.0, 2.0]


@pytest.mark.parametrize("before", [{}, states(INT4, "magnitude", [1.0]), states(LOW_RANK, "error", [1.0])])
def test_without_errors_of_the_same_exchange_they_begin_anew(before: dict[Any, Any]) -> None:
    """This rank was alone, or sent nothing for its node; or the exchange is another one."""
    now = states(INT4, "residual", [0.5])
    carry_errors(before, now)
    assert now[INT4, 0, 0]["residual"].tolist() == [0.5]


def test_nothing_is_carried_without_feedback() -> None:
    exchange = ScatterGather(Int4(), running_scale=True)
    now = states(exchange, "magnitude", [0.0])
    carry_errors(states(exchange, "magnitude", [1.0]), now)
    assert now[exchange, 0, 0]["magnitude"].item() == 0.0, "it must be the same on all ranks, and a newcomer has none"


def test_survivors_keep_them_and_a_newcomer_has_none(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is lost, and one arrives."""
    seen: list[tuple[list[float], list[float]]] = []

    def errors(states: Any) -> list[float]:
        return [value for state in states.values() for value in state.get("residual", torch.zeros(0)).view(-1).tolist()]

    def carry(before: Any, now: Any) -> None:
        old = errors(before)
        carry_errors(before, now)
        seen.append((old, errors(now)))

    monkeypatch.setattr(opened_groups, "carry_errors", carry)
    script = Arrival(store, dies=False)
    options = {"codec": "int4", "hierarchical": False}
    check_ends(run_teams(2 * RANKS, script.train, "bytegrad", options))
    survivors = [(old, new) for old, new in seen if old]
    assert len(survivors) >= 2 * (2 * RANKS - 1), "at the loss and at the arrival"
    assert all(old == new for old, new in survivors) and any(any(old) for old, _ in survivors)
    assert any(not old and not any(new) for old, new in seen), "the newcomer's"

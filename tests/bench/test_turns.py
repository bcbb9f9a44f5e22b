"""The order of measurements that take turns, and their quartiles."""

from __future__ import annotations

import statistics

import pytest

from bagua.bench.turns import pairs, quartiles, turns


def test_pairs_alternate_and_keep_who_is_who() -> None:
    calls: list[str] = []

    def call(name: str) -> str:
        calls.append(name)
        return f"{name}{len(calls)}"

    assert pairs(lambda: call("a"), lambda: call("b"), 3) == [("a1", "b2"), ("a4", "b3"), ("a5", "b6")]
    assert "".join(calls) == "abbaab"


def test_turns_go_round_and_leave_out_the_warmup() -> None:
    calls: list[str] = []
    told: list[tuple[int, int]] = []

    def call(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = turns({name: lambda name=name: call(name) for name in "xy"}, 2, 1, lambda *done: told.append(done))
    assert "".join(calls) == "xyxyxy"
    assert found == {"x": [3, 5], "y": [4, 6]}
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_quartiles() -> None:
    assert quartiles([4.0, 1.0, 3.0, 2.0]) == (1.25, 2.5, 3.75)
    assert quartiles([7]) == (7.0, 7.0, 7.0)
    with pytest.raises(statistics.StatisticsError):
        quartiles([])

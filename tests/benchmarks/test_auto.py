"""The benchmark of the choice: conditions, summary, and a quick run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bagua.bench.conditions import parse
from benchmarks.auto.__main__ import KNOWN, drawn, joined, summarise
from tests.benchmarks.quick_run import run_quickly


def test_conditions_are_drawn_from_the_seed() -> None:
    assert drawn(6, 1) == drawn(6, 1) != drawn(6, 2)
    for name in (*KNOWN, *drawn(50, 3)):
        assert 49e6 <= parse(name).bits_per_s <= 5.1e9


def rank(steps_ms: list[float]) -> dict[str, Any]:
    rows = [
        {"name": "gradient_allreduce", "verdict": "slower"},
        {"name": "bytegrad", "verdict": "chosen"},
        {"name": "bytegrad:codec=sign", "verdict": "learns worse than the limit of 2.0 %"},
    ]
    auto = {"steps_to_choose": 17, "steps_ms": steps_ms, "explanation": {"chosen": "bytegrad", "rows": rows}}
    fixed = {"gradient_allreduce": [100.0], "bytegrad": [33.0], "bytegrad:codec=sign": [20.0], "ddp": [99.0]}
    return {"auto": auto, "fixed": {**fixed, "bytegrad:codec=int4": [30.0]}}


def test_the_choice_is_compared_with_what_learns_well_enough() -> None:
    result = {"condition": "1gbit/0ms", **joined([rank([30.0, 40.0]), rank([35.0, 31.0])])}
    assert result["auto"]["steps_ms"] == [35.0, 40.0]
    row = summarise(result, "lossy")
    assert row["best"] == "bytegrad:codec=int4"
    assert row["over_best"] == pytest.approx(0.1)
    assert row["over_ddp"] == pytest.approx(-2 / 3)


@pytest.mark.slow
def test_a_quick_run(tmp_path: Path) -> None:
    content, output = run_quickly("auto", tmp_path, "--local", "--hosts", "2")
    (result,) = content["results"]
    assert result["summary"]["chosen"] in result["fixed"]
    assert result["summary"]["steps_to_choose"] < 40
    assert "of DDP" in output

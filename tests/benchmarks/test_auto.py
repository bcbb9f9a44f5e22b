"""The benchmark of the choice: conditions, summary, and a quick run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagua.bench.conditions import Condition, parse
from benchmarks.auto import __main__ as benchmark
from benchmarks.auto.__main__ import KNOWN, drawn
from benchmarks.auto.judging import barred, finalists, joined, summarise, verdict
from tests.benchmarks.quick_run import run_quickly
from tests.fork_server import ForkServer


def test_conditions_are_drawn_from_the_seed() -> None:
    assert drawn(6, 1) == drawn(6, 1) != drawn(6, 2)
    for name in (*KNOWN, *drawn(50, 3)):
        assert 49e6 <= parse(name).bits_per_s <= 5.1e9


def rank(steps_ms: list[float], chosen: str = "bytegrad") -> dict[str, Any]:
    rows = [
        {"name": "gradient_allreduce", "verdict": "slower", "loss_gap": 0.0},
        {"name": "bytegrad", "verdict": "chosen", "loss_gap": 0.001},
        {"name": "bytegrad:codec=sign", "verdict": "learns worse than the limit of 2.0 %", "loss_gap": 0.4},
    ]
    auto = {"steps_to_choose": 17, "steps_ms": steps_ms, "explanation": {"chosen": chosen, "rows": rows}}
    heat = {"gradient_allreduce": [100.0], "bytegrad": [40.0], "bytegrad:codec=int4": [31.0], "ddp": [99.0]}
    return {"auto": auto, "heat": heat, "fixed": {"bytegrad": [32.4], "bytegrad:codec=int4": [30.0]}}


def test_the_choice_is_compared_with_what_learns_well_enough() -> None:
    result = {"condition": "1gbit/0ms", **joined([rank([30.0, 40.0]), rank([35.0, 31.0])])}
    assert result["auto"]["steps_ms"] == [35.0, 40.0]
    assert barred(result["auto"]["explanation"]) == {"bytegrad:codec=sign"}
    row = summarise(result, "lossy")
    assert row["best"] == "bytegrad:codec=int4"
    assert row["over_best"] == pytest.approx(0.08)
    assert row["over_ddp"] == pytest.approx(32.4 / 99 - 1)
    assert verdict(row, 0.02) == []
    assert verdict(row | {"over_best": 0.11, "over_ddp": 0.03, "steps_to_choose": 40}, 0.0005) == [
        "11% slower than bytegrad:codec=int4",
        "3% slower than DDP",
        "learns worse than the limit",
        "40 steps to choose",
    ]


def test_after_a_change_the_second_choice_is_compared() -> None:
    one = rank([30.0])
    one["auto"]["again"] = rank([], "bytegrad:codec=int4")["auto"]["explanation"]
    row = summarise({"condition": "1gbit/0ms", **joined([one])}, "lossy")
    assert (row["before"], row["chosen"], row["over_best"]) == ("bytegrad", "bytegrad:codec=int4", 0.0)
    assert "too many steps to choose again" in verdict(row, 0.02)


def test_ddp_is_timed_well_where_the_choice_is_hardly_faster() -> None:
    heat = {"gradient_allreduce": [10.0], "bytegrad": [12.0], "bytegrad:codec=int4": [30.0], "ddp": [10.1]}
    assert finalists(heat, "gradient_allreduce", "lossy") == list(heat)
    assert "ddp" not in finalists({**heat, "ddp": [20.0]}, "gradient_allreduce", "lossy")


def test_what_is_known_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def run(condition: Condition, job: dict[str, Any], hosts: int, local: bool) -> dict[str, Any]:
        measured.append(condition.name)
        return {"condition": condition.name, **joined([rank([30.0])])}

    monkeypatch.setattr(benchmark, "run_condition", run)
    monkeypatch.setattr(benchmark.machine, "describe_machine", dict)
    file = tmp_path / "out.json"
    for words in (["--only", "2-3"], ["--minutes", "0", "--limit-s", "5"], [], ["--compute-ms", "9", "--only", "1"]):
        assert benchmark.main(["--json", str(file), *words]) == 0
    assert measured == [*KNOWN[1:3], KNOWN[0], *KNOWN[3:], *drawn(6, 2026), KNOWN[0]]
    assert len(json.loads(file.read_text())["results"]) == 13
    assert benchmark.main(["--only", "0-3"]) == 2
    assert "--only: expected numbers from 1 to 12, as 1,4-6, got '0-3'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run(fork_server: ForkServer, tmp_path: Path) -> None:
    content, output = run_quickly(fork_server, "auto", tmp_path, "--local", "--hosts", "2")
    (result,) = content["results"]
    assert result["summary"]["chosen"] in result["fixed"]
    assert "ddp" in result["heat"]
    assert result["summary"]["steps_to_choose"] < 40
    assert "of DDP" in output

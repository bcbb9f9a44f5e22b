"""The benchmark of the choice: conditions, summary, and a quick run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagua.auto.watch import Watch
from bagua.bench.conditions import Condition, parse
from benchmarks.auto import __main__ as benchmark
from benchmarks.auto import alarms, losses
from benchmarks.auto.__main__ import KNOWN, drawn
from benchmarks.auto.judging import barred, finalists, joined, line, noticed_after, summarise, verdict
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
    row["loss_gap"] = 0.0
    assert verdict(row, 0.02) == []  # what runs is among the best
    assert "no second choice" in verdict(row | {"over_best": 0.11}, 0.02)
    assert "and no second choice, " in line(row, 0.02)


def test_steps_after_a_change_are_told_apart() -> None:
    steps = [{"phase": "settled", "chosen": "a"}] * 5
    trial, second = {"phase": "trying", "chosen": "b"}, {"phase": "settled", "chosen": "b"}
    assert noticed_after(steps) is None
    assert noticed_after([*steps, trial, second]) == 6
    assert noticed_after([*steps, second]) == 6  # no trial was needed
    one = rank([30.0])
    one["auto"] |= {"again": one["auto"]["explanation"], "after_change": [*steps, trial, second]}
    one["auto"]["steps_to_choose_again"] = 21
    row = summarise({"condition": "1gbit/0ms", **joined([one])}, "lossy")
    assert "then bytegrad after 21 steps, 6 of them to notice" in line(row, 0.02)
    assert "missed: 21 steps to choose again" in line(row | {"over_best": 0.0}, 0.02)


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


def trained(setting: str, task: str, seed: int, loss: float, accuracy: float) -> dict[str, Any]:
    chosen = "bytegrad" if setting == "auto" else setting
    found = {"task": task, "setting": setting, "seed": seed, "steps": 9, "chosen": chosen}
    return found | {"loss": loss, "accuracy": accuracy}


def test_what_is_learned_is_compared_with_ddp_seed_by_seed() -> None:
    base = [trained("ddp", "char_lm", seed, loss, 0.4) for seed, loss in ((0, 2.0), (1, 3.0), (2, 9.0))]
    runs = [trained("auto", "char_lm", seed, loss, 0.1) for seed, loss in ((0, 2.1), (1, 3.1))]
    assert losses.gap_between(runs, base) == pytest.approx(0.2 / 5)
    digits = [trained("auto", "digits", 0, 9.0, 0.94)]
    assert losses.gap_between(digits, [trained("ddp", "digits", 0, 0.1, 0.95)]) == pytest.approx(0.04)  # of a point
    with pytest.raises(ValueError, match="base: has no run"):
        losses.gap_between([trained("auto", "char_lm", 7, 2.0, 0.4)], base)
    fixed = {"ddp": base, "bytegrad": [trained("bytegrad", "char_lm", 1, 3.03, 0.4)]}
    (row,) = losses.rows_of({"condition": "1gbit/0ms", "runs": runs}, fixed, "bytegrad", "lossy")
    assert (row["within"], row["setting_within"], row["limit"]) == (False, True, 0.02)
    assert row["setting_gap"] == pytest.approx(0.01)
    assert "gap +4.00 % of 2.0 % -- missed; bytegrad +1.00 %" in losses.text_of(row)


def test_what_was_trained_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def run(hosts: Any, setting: str, job: Any) -> list[dict[str, Any]]:
        asked.append(setting)
        return [trained(setting, task, seed, 2.0, 0.9) for task in losses.TASKS for seed in job["seeds"]]

    monkeypatch.setattr(losses, "run", run)
    monkeypatch.setattr(losses.machine, "describe_machine", dict)
    chosen, file = tmp_path / "auto.json", tmp_path / "losses.json"
    choices = [{"condition": name, "summary": {"chosen": "bytegrad"}} for name in KNOWN]
    chosen.write_text(json.dumps({"results": choices}))
    words = ["--losses", "--local", "--json", str(file), "--chosen", str(chosen)]
    assert benchmark.main([*words, "--only", "1-2"]) == 0
    assert benchmark.main([*words, "--only", "2-3"]) == 0
    assert asked == ["ddp", "bytegrad", "auto", "auto", "auto"]
    content = json.loads(file.read_text())
    assert [row["condition"] for row in content["rows"]] == [name for name in KNOWN[:3] for _ in losses.TASKS]
    assert all(row["within"] and row["setting"] == "bytegrad" for row in content["rows"])
    assert benchmark.main([*words, "--family", "adam"]) == 1
    assert benchmark.main(["--losses", "--chosen", str(tmp_path / "none.json")]) == 2
    errors = capsys.readouterr().err
    assert "was measured with other options" in errors
    assert "--chosen: " in errors and "has no choices" in errors


def test_alarms_of_a_rule_are_counted_by_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steady, rising = alarms.recorded([1.0]), alarms.recorded([2.0**k for k in range(64)])
    for make, look in ((alarms.Before, 4), (Watch, 2)):
        assert alarms.alarmed(make, look, steady, 3, 40) == 0.0
        assert alarms.alarmed(make, look, rising, 3, 40) == 1.0
    before = [{"comm_ms": 1.0 + 0.01 * (k % 7)} for k in range(40)]
    (tmp_path / "change.json").write_text(
        json.dumps({"results": [{"condition": "1gbit/1ms", "auto": {"before_change": before}}]})
    )
    words = ["--recorded", str(tmp_path / "change.json"), "--json", str(tmp_path / "out.json")]
    assert alarms.main([*words, "--trainings", "5", "--steps", "60"]) == 0
    rows = {row["noise"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert rows["recorded, 1gbit/1ms"] == {"noise": "recorded, 1gbit/1ms", "before": 0.0, "now": 0.0}
    assert rows["independent, 10 %"]["now"] == 0.0
    assert "recorded, 1gbit/1ms" in capsys.readouterr().out


@pytest.mark.slow
def test_a_quick_training(fork_server: ForkServer, tmp_path: Path) -> None:
    content, output = run_quickly(fork_server, "auto", tmp_path, "--local", "--losses")
    assert {row["task"] for row in content["rows"]} == {"digits", "char_lm"}
    assert all(run["steps"] < 40 for run in content["fixed"]["ddp"])
    assert "50mbit/2ms, digits: " in output


@pytest.mark.slow
def test_a_quick_run(fork_server: ForkServer, tmp_path: Path) -> None:
    content, output = run_quickly(fork_server, "auto", tmp_path, "--local", "--hosts", "2")
    (result,) = content["results"]
    assert result["summary"]["chosen"] in result["fixed"]
    assert "ddp" in result["heat"]
    assert result["summary"]["steps_to_choose"] < 40
    assert "of DDP" in output

"""A subset run again takes the place of its earlier runs; everything else stays."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.convergence.__main__ import build_parser
from benchmarks.convergence.configurations import by_name, select
from benchmarks.convergence.merge import combine, read, without_known_bases
from benchmarks.convergence.report import summarise, to_json
from benchmarks.convergence.training import Outcome

RUN = Outcome("digits", "bytegrad", 0, 0.9, 0.3, 0.9, 0.3, 10.0, 0.0, 1.0, (0, 1), (2.0, 0.3), (0.0, 0.1))
OTHER = replace(RUN, configuration="torch DDP", accuracy=0.91)
FAILED = replace(RUN, configuration="diloco", accuracy=math.nan, loss=math.nan, curve_loss=(), error="boom")


def test_a_file_gives_its_runs_back(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    gone = replace(RUN, configuration="no longer there")
    path.write_text(to_json({"quick": False}, [], [RUN, OTHER, gone]))
    assert read(path, quick=False) == [RUN, OTHER]
    path.write_text(to_json({"quick": False}, [], [FAILED]))
    (failed,) = read(path, quick=False)
    assert failed.error == "boom" and math.isnan(failed.loss)
    with pytest.raises(ValueError, match="without --quick"):
        read(path, quick=True)


def test_what_was_run_again_replaces_all_its_seeds() -> None:
    now = replace(RUN, seed=2, accuracy=0.95)
    merged = combine([RUN, replace(RUN, seed=1), OTHER, replace(RUN, task="char_lm")], [now])
    assert merged == [OTHER, replace(RUN, task="char_lm"), now]
    rows = summarise([replace(OTHER, seed=2), now], [by_name("torch DDP"), by_name("bytegrad")], {"digits": "accuracy"})
    assert [row.configuration for row in rows] == ["torch DDP", "bytegrad"] and rows[1].difference is not None
    assert abs(rows[1].difference - (91.0 - 95.0)) < 1e-9


def test_known_baselines_are_not_run_again() -> None:
    chosen = select(["bytegrad"])
    names = [each.name for each in without_known_bases(chosen, ["bytegrad"], [OTHER], ["digits"])]
    assert "torch DDP" not in names and "torch DDP, adam" in names and "bytegrad" in names
    assert without_known_bases(chosen, ["bytegrad"], [OTHER], ["digits", "char_lm"]) == chosen
    assert without_known_bases(chosen, ["torch DDP", "bytegrad"], [OTHER], ["digits"]) == chosen


def test_names_with_commas() -> None:
    parse = build_parser().parse_args
    assert parse(["--only", "qadam,async"]).only == ["qadam", "async"]
    assert parse(["--only", "torch DDP, lamb; async"]).only == ["torch DDP, lamb", "async"]


def test_the_results_in_the_repository_can_be_merged_with() -> None:
    path = Path(__file__).resolve().parents[2] / "benchmarks/results/2026-11-26-convergence/results.json"
    report, runs = json.loads(path.read_text()), read(path, quick=False)
    assert len(runs) == len(report["runs"]) and report["merged_with"] == "2026-11-25-convergence"
    assert {row["seeds"] for row in report["rows"]} == {3}

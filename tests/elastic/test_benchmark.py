"""The benchmark's judgement of journals that are written here, and its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.elastic import judge as judge_module
from benchmarks.elastic import report
from benchmarks.elastic.__main__ import main
from benchmarks.elastic.judge import Run, judge

Journal = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def twelve_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "NUM_IMAGES", 12)


def journal(rank: int, size: int, meeting: str, start: int, steps: list[tuple[int, list[int]]], **end: Any) -> Journal:
    """Of one rank: (epoch, images) of each step after `start`."""
    head = {"began": float(start * 10 + rank), "rank": rank, "size": size, "meeting": meeting, "host": rank, "pid": 1}
    lines: Journal = [head, {"restored": None, "step": start}]
    lines += [{"step": start + at, "epoch": epoch, "samples": images} for at, (epoch, images) in enumerate(steps, 1)]
    return [*lines, {"ended": True, **end}] if end else lines


def good() -> list[Journal]:
    """One epoch of 12 images: two ranks make three steps, of which two count; one rank goes on from there."""
    return [
        journal(0, 2, "a", 0, [(0, [0, 2]), (0, [4, 6]), (0, [8, 10])]),
        journal(1, 2, "a", 0, [(0, [1, 3]), (0, [5, 7]), (0, [9, 11])]),
        journal(0, 1, "b", 2, [(0, [8, 9]), (0, [10, 11])], accuracy=0.5),
    ]


def judged(found: list[Journal]) -> Run:
    result = Run("kill-rank", 0, 2)
    judge(result, found, 1)
    return result


def test_a_good_run() -> None:
    result = judged(good())
    assert result.problems == []
    assert (result.meetings, result.lost_steps, result.repeated, result.accuracy) == (2, [1], 0, 0.5)


def test_images_that_are_left_out_or_repeated_are_found() -> None:
    found = good()
    found[2][3]["samples"] = [10, 10]
    assert judged(found).problems == ["epoch 0: 1 images left out, 1 repeated"]
    found = good()
    found[2][3]["samples"] = [10, 11, 0]  # one rank needs no padding
    assert judged(found).problems == ["epoch 0: 0 images left out, 1 repeated"]


def test_more_than_an_interval_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "COMMIT_EVERY", 0)
    assert judged(good()).problems == ["lost 1 steps"]


def test_missing_journals_and_ends_are_found() -> None:
    found = good()
    assert "a rank left no journal" in judged([found[0], found[2]]).problems
    assert "no rank came to the end" in judged([*found[:2], found[2][:-1]]).problems
    assert judged([]).problems == ["no training took place"]


def run_of(scenario: str, seed: int, **other: Any) -> dict[str, Any]:
    facts = {"problems": [], "hung": False, "lost_steps": [3], "repeated": 1, "recovered_s": 10.0, "accuracy": 0.975}
    return {"scenario": scenario, "seed": seed, **facts, **other}


def test_files_are_merged_and_nothing_is_counted_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = [{"epochs": 6, "seed": 0, "accuracy": 0.98}]
    first = {"runs": [run_of("kill-host", 1)], "undisturbed": alone}
    second = {"runs": [run_of("kill-host", 1, hung=True), run_of("kill-host", 0, lost_steps=[9], recovered_s=20.0)]}
    second |= {"undisturbed": alone}
    for name, each in (("a.json", first), ("b.json", second)):
        (tmp_path / name).write_text(json.dumps(each))
    words = ["--runs", "0", "--json", str(tmp_path / "a.json"), "--add", str(tmp_path / "b.json"), "--table"]
    assert main(words) == 0
    merged = json.loads((tmp_path / "a.json").read_text())
    assert [(each["seed"], each["hung"]) for each in merged["runs"]] == [(0, False), (1, False)]
    assert merged["undisturbed"] == alone
    row = capsys.readouterr().out.splitlines()[2]
    assert row == (
        "| a host is killed, 3 hosts | 2 | 0 | 2 | 9 | 1 | 15 (10 to 20) | 97.5 (97.5 to 97.5) | "
        "98.0 (98.0 to 98.0) of 1 |"
    )


def test_a_missing_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--runs", "0", "--add", str(tmp_path / "none.json")])
    assert "--add: no file" in capsys.readouterr().err


def test_a_bad_run_is_counted() -> None:
    runs = [run_of("kill-rank", 0), run_of("kill-rank", 1, hung=True, problems=["x"], accuracy=None, recovered_s=None)]
    (line,) = report.summary({"runs": runs, "undisturbed": []})
    assert line.startswith("kill-rank: 1 of 2 good, 1 hung; lost at most 3 steps")

"""The benchmark of sites: its bounds by hand, and that the figures of its result file follow from the steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagua.bench import models
from benchmarks.levels import SYSTEMS, bound_s, main, rows_of

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
FOLDERS = ("2026-11-25-levels", "2026-11-27-trial")


def test_bounds() -> None:
    # 2.5 M elements of 8 bits at 100 Mbit/s, after a third of 150 ms
    assert bound_s(SYSTEMS["8 bits, sites"], 2_500_000, 0.15, 100e6) == pytest.approx(0.05 + 0.2)
    assert bound_s(SYSTEMS["1 bit"], 1000, 0.15, 100e6) == 0.15


@pytest.mark.parametrize(
    "file",
    [file for name in FOLDERS for file in sorted((RESULTS / name).glob("*.json"))],
    ids=lambda file: f"{file.parent.name}-{file.stem}",
)
def test_rows_follow_from_the_steps(file: Path) -> None:
    report = json.loads(file.read_text())
    settings = report["settings"]
    rate = float(settings["link"].split("mbit")[0]) * 1e6
    assert report["rows"] == rows_of(report["times_s"], settings["num_elements"], settings["compute_ms"] / 1000, rate)
    assert models.get(settings["model"]).num_elements == settings["num_elements"]
    assert all(len(turns) == settings["rounds"] for turns in report["times_s"].values())


def test_ratios_are_of_the_same_turn() -> None:
    times = {name: [[2.0], [9.0]] for name in SYSTEMS}
    times["8 bits, sites"] = [[1.0], [3.0]]
    row = next(row for row in rows_of(times, 1000, 0.5, 1e9) if row["system"] == "8 bits, sites")
    assert row["x_ddp"] == row["x_without_sites"] == 2.5 and row["ms"] == 2000


@pytest.mark.parametrize("option", ["--link", "--host-link"])
@pytest.mark.parametrize("link", ["1gbitt", "1gbit/5", "100mbit/20ms/3"])
def test_a_link_that_is_none_is_named(option: str, link: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([option, link])
    assert f"argument {option}: {link!r}: " in capsys.readouterr().err

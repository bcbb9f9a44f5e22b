"""The benchmark of a slow host: its figures by hand, its options, and that the table follows from the stored runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.decoupled import parse, rows_of

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results/2026-11-23-decoupled"


def run(name: str, speed: float, seed: int, goodput: float, loss: float) -> dict[str, Any]:
    return {"name": name, "speeds": [1.0, speed], "seed": seed, "goodput": goodput, "loss": loss, "mb": 3.0}


def test_goodput_is_beside_the_same_algorithm_and_loss_beside_diloco() -> None:
    measured = [
        run("diloco", 1.0, 1, 10.0, 2.0),
        run("diloco", 0.5, 1, 5.0, 2.0),
        run("decoupled_diloco", 1.0, 1, 8.0, 2.5),
        run("decoupled_diloco", 0.5, 1, 6.0, 1.9),
        run("diloco", 1.0, 2, 10.0, 4.0),
        run("diloco", 0.5, 2, 5.0, 4.0),
        run("decoupled_diloco", 1.0, 2, 8.0, 4.5),
        run("decoupled_diloco", 0.5, 2, 6.0, 4.4),
    ]
    _, slow, fast, both = rows_of(measured)
    assert slow["goodput_lost_percent"] == 50 and slow["loss_percent"] == 0 and slow["each_loss_percent"] == [0, 0]
    assert fast["loss_percent"] == pytest.approx(100 * (3.5 / 3 - 1))
    assert both["goodput_lost_percent"] == 25 and both["loss_percent"] == pytest.approx(5)
    assert both["each_loss_percent"] == pytest.approx([-5, 10]) and both["slow_host"]
    (only, *_) = rows_of(measured[2:4])
    assert only["loss_percent"] is None


def test_options() -> None:
    assert parse(["grace=0.5", "codec=int4", "min_steps=None"]) == {"grace": 0.5, "codec": "int4", "min_steps": None}
    with pytest.raises(ValueError, match="--option: expected name=value, got 'grace'"):
        parse(["grace"])


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_rows_follow_from_the_runs(file: Path) -> None:
    report = json.loads(file.read_text())
    if report["rows"]:  # none of the runs for tuning, which lack those without a slow host
        assert report["rows"] == rows_of(report["measured"])
    total = report["settings"]["hosts"] * report["settings"]["steps"]
    assert all(sum(each["steps"]) == total for each in report["measured"])

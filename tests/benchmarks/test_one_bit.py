"""The comparison of codecs on the small GPT runs, and its arithmetic is right. Its figures are not judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.convergence import one_bit
from benchmarks.convergence.one_bit import Run, summarise, table


def test_summary() -> None:
    runs = [
        Run("sgd", "gradient_allreduce", 1, 2.0, 100.0, 1.0),
        Run("sgd", "sign", 1, 2.5, 3.0, 1.0),
        Run("sgd", "sign", 2, 9.0, 3.0, 1.0),  # without a run in full precision beside it
    ]
    exact, sign = summarise(runs)
    assert exact["percent_behind"] == 0 and sign["percent_behind"] == pytest.approx(25) and sign["seeds"] == [1]
    assert "| sgd | sign | 2.500 | +25.0 | +25.0 | 3.0 |" in table([exact, sign])


@pytest.mark.slow
@pytest.mark.process
def test_the_file_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    options = ["--seeds", "1", "--steps", "2", "--optimizers", "sgd", "--only", "gradient_allreduce,sign"]
    assert one_bit.main([*options, "--workers", "1", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert [row["row"] for row in written["rows"]] == ["gradient_allreduce", "sign"]
    assert {"date", "machine", "data", "steps", "ranks", "parameters", "rates", "runs"} <= set(written)
    assert written["rates"] == {"adamw": 4e-3, "sgd": 0.05} and written["parameters"] == 83_008
    assert table(written["rows"]) in capsys.readouterr().out
    exact, sign = written["runs"]
    assert 0 < sign["mb"] < exact["mb"] / 20

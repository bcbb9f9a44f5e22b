"""Figures are made from a results file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bagua.bench import plots
from bagua.bench.main import main
from bagua.bench.rows import Row


def report(**changes: Any) -> dict[str, Any]:
    rows = [
        Row(f"{speed}/{delay}", name, family, 4, "layers25m", step_ms, step_ms, step_ms, bytes_per_host=1e6).as_dict()
        for name, family in (("ddp", "torch"), ("bytegrad", "bagua"))
        for speed, delay, step_ms in (("1gbit", "0ms", 500.0), ("1gbit", "5ms", 600.0), ("100mbit", "0ms", 5000.0))
    ]
    rows.append({**rows[0], "entrant": "broken", "step_ms": None, "error": "gone"})
    return {
        "kind": "tradeoff",
        "date": "2026-11-21T00:00:00+00:00",
        "settings": {"compute_ms": 300, "hosts": 4},
        "model": {"name": "layers25m", "num_elements": 25_000_000, "num_layers": 16},
        "machine": {"cpu": "x", "cores": 2, "torch": "2", "load_1min": 0.0},
        "bagua": "0",
        "left_out": [],
        "rows": rows,
        **changes,
    }


def test_both_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    paths = plots.plot_report(report(), tmp_path)
    assert [path.name for path in paths] == ["bandwidth.png", "bandwidth.svg", "latency.png", "latency.svg"]
    assert all(path.stat().st_size > 5000 for path in paths)
    text = (tmp_path / "bandwidth.svg").read_text()
    assert "bytegrad" in text and "25.0 M fp32" in text and "broken" not in text


def test_few_lines_that_can_be_told_apart() -> None:
    """Of 20 contenders those are drawn that come first; each line has a colour and a shape of its own."""
    (figure, _) = plots._of_tradeoff(report(rows=many_rows())["rows"])
    names = plots._chosen(figure)
    assert len(names) == len(set(plots._COLOURS)) == len(set(plots._MARKERS)) == 9
    assert {"ddp", "post_local_sgd", "bytegrad"} <= set(names) and "alone" not in names
    assert plots._honest(figure, names) == "2 values measured, lines only join them; 12 more in the table"


def many_rows() -> list[dict[str, Any]]:
    names = [f"other{number}" for number in range(10)] + list(plots._FIRST) + ["more"]
    rows = [{**row, "entrant": name} for name in names for row in report()["rows"][:3]]
    return [*rows, {**rows[0], "entrant": "alone"}]


def test_collectives(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    rows = [
        {"condition": "1gbit/5ms", "operation": name, "size_bytes": size, "measured_ms": size / 1e4, "error": ""}
        for name in ("torch all_reduce", "mean, direct")
        for size in (16384, 1 << 20)
    ]
    paths = plots.plot_report(report(kind="primitives", rows=rows, model=None), tmp_path)
    assert [path.name for path in paths] == ["primitives-1gbit-5ms.png", "primitives-1gbit-5ms.svg"]
    assert "mean, direct" in paths[1].read_text()


def test_one_condition_makes_no_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    one = [row for row in report()["rows"] if row["condition"] == "1gbit/0ms"]
    assert plots.plot_report(report(rows=one), tmp_path) == []


def test_without_matplotlib_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = tmp_path / "out.json"
    file.write_text(json.dumps(report()))
    assert main(["report", str(file), "--plots", str(tmp_path / "plots")]) == 0
    printed = capsys.readouterr()
    assert "matplotlib is not installed" in printed.err
    assert "| bytegrad | 500 |" in printed.out and "error: gone" in printed.out

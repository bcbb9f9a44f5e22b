"""The figures of step time against bandwidth and latency, from a results file made here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures.curves import Curves, draw_bandwidth, draw_latency


def row(condition: str, name: str, step_ms: float, bound_ms: float, **more: Any) -> dict[str, Any]:
    made = {"condition": condition, "entrant": name, "step_ms": step_ms, "bound_ms": bound_ms, "limited": ""}
    return {**made, "error": "", **more}


@pytest.fixture
def curves(tmp_path: Path) -> Curves:
    rows = [
        row("100mbit/0ms", "ddp", 1300, 1200),
        row("50mbit/0ms", "ddp", 2500, 2400),
        row("nolimit", "ddp", 130, 110, limited="cores 95% busy"),
        row("100mbit/50ms", "ddp", 1700, 1300),
        row("1gbit/5ms", "ddp", 200, 150),
        row("100mbit/0ms", "int4", 260, 200),
        {**row("50mbit/0ms", "int4", 470, 400), "error": "rank 1 has failed", "step_ms": None},
        row("100mbit/50ms", "int4", 370, 300),
        row("100mbit/0ms", "off", 100, 100),
    ]
    file = tmp_path / "2026-11-23-curves" / "curves.json"
    file.parent.mkdir()
    settings = {"hosts": 4, "compute_ms": 100}
    content = {"date": "2026-11-23T12:00", "settings": settings, "model": {"num_elements": 2_500_000}, "rows": rows}
    file.write_text(json.dumps(content))
    return Curves(file)


def test_points_are_in_order_and_failures_are_left_out(curves: Curves) -> None:
    found = curves.by_bandwidth()
    assert [point.x for point in found["ddp"]] == [50, 100, math.inf]
    assert [point.limited for point in found["ddp"]] == [False, False, True]
    assert [point.step_ms for point in found["int4"]] == [260]
    rate, lines = curves.by_latency()
    assert rate == 100, "of the rates with latencies, the one with most"
    assert [(point.x, point.step_ms, point.bound_ms) for point in lines["ddp"]] == [(0, 1300, 1200), (50, 1700, 1300)]
    assert set(lines) == {"ddp", "int4"}


def test_both_figures_have_lines_bounds_and_their_origin(curves: Curves) -> None:
    bandwidth, latency = draw_bandwidth(curves).render(), draw_latency(curves).render()
    assert "no limit" in bandwidth and "no limit" not in latency
    for text in (bandwidth, latency):
        assert "torch DDP" in text and "gradient_allreduce, 4 bits" in text and "bytegrad" not in text
        assert text.count('stroke-dasharray="3 3"') == 2, "a bound for each line"
        assert "4 emulated hosts, 2.5 M fp32 parameters" in text and "2026-11-23" in text
    assert bandwidth.count("<circle") == 4 and latency.count("<circle") == 4
    assert draw_bandwidth(curves).render(dark=True) != bandwidth

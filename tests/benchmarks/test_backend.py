"""The benchmark of the backend runs and writes what it says. Its times are not judged here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.backend import SYSTEMS
from tests.benchmarks.quick_run import run_quickly
from tests.fork_server import ForkServer

pytestmark = pytest.mark.process


@pytest.mark.slow
def test_quick_run(fork_server: ForkServer, tmp_path: Path) -> None:
    report, printed = run_quickly(fork_server, "backend", tmp_path)
    results = {each["system"]: each for each in report["results"]}
    assert tuple(results) == SYSTEMS
    assert all(name in printed for name in SYSTEMS)
    for each in results.values():
        assert all(math.isfinite(each[name]) and each[name] > 0 for name in ("step_ms", "times_plain", "times_hook"))
    exact = results["ddp over gloo"]["sent_kb"]
    assert exact == pytest.approx(2 * (192 * 192 + 192) * 4 / 1e3)
    assert exact / results["backend 8 bits"]["sent_kb"] >= 3.9
    assert exact / results["ddp_hook 8 bits"]["sent_kb"] >= 3.9
    assert exact / results["backend 4 bits"]["sent_kb"] >= 7
    assert results["ddp fp16 hook"]["sent_kb"] == exact / 2

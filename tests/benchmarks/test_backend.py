"""The benchmark of the backend runs and writes what it says. Its times are not judged here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.backend import SYSTEMS

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]


def test_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "backend.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.backend", "--quick", "--json", str(file)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    results = {each["system"]: each for each in report["results"]}
    assert tuple(results) == SYSTEMS
    assert all(name in done.stdout for name in SYSTEMS)
    for each in results.values():
        assert all(math.isfinite(each[name]) and each[name] > 0 for name in ("step_ms", "times_plain", "times_hook"))
    exact = results["ddp over gloo"]["sent_kb"]
    assert exact == pytest.approx(2 * (192 * 192 + 192) * 4 / 1e3)
    assert exact / results["backend 8 bits"]["sent_kb"] >= 3.9
    assert exact / results["ddp_hook 8 bits"]["sent_kb"] >= 3.9
    assert exact / results["backend 4 bits"]["sent_kb"] >= 7
    assert results["ddp fp16 hook"]["sent_kb"] == exact / 2

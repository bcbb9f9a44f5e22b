"""The demo runs, writes its three files, and shows what went wrong on a rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bagua
from tests.examples.scripts import needs, start

pytestmark = needs("sklearn", "matplotlib")


def test_quick_demo(tmp_path: Path) -> None:
    done = start("examples/demo.py", "--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "demo.json").read_text())
    rows = {row["algorithm"]: row for row in report["rows"]}
    assert list(rows) == ["torch DDP", *(row.name for row in bagua.algorithms.available(builtin_only=True))]
    for row in rows.values():
        assert row["steps"] == 1437 // 2 // 128
        assert 0 <= row["test_accuracy"] <= 1
        assert row["step_ms"] > row["exposed_ms"] >= 0
        assert row["mb_per_step"] > 0 or row["algorithm"] in ("async", "diloco", "local_sgd", "sparse_loco"), (
            "a short run"
        )
        assert row["algorithm"] in done.stdout
    assert rows["bytegrad"]["compression_ratio"] > 3.5
    # DDP's bytes come from the formula, Bagua's from its meter.
    assert rows["gradient_allreduce"]["mb_per_step"] == pytest.approx(rows["torch DDP"]["mb_per_step"], rel=1e-3)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "demo.svg").read_text()
    assert "</svg>" in svg
    assert all(name in svg for name in rows)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_demo_with_its_traceback(tmp_path: Path) -> None:
    done = start("examples/demo.py", "--quick", "--out", tmp_path, "--bucket-bytes", "-1")
    assert done.returncode == 1
    assert "a rank failed" in done.stderr
    assert "Traceback" in done.stderr
    assert not (tmp_path / "demo.json").exists()

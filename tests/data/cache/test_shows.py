"""The example and the benchmark run and write what they say. Times are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cache.contenders import CONTENDERS, missing

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]


def run(*command: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_on_two_ranks_computes_each_sample_once(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("lmdb")
    file = tmp_path / "result.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run(*launcher, "examples/cached_digits.py", "--rounds", "3", "--epochs", "3", "--workers", "1", "--json", str(file))
    result = json.loads(file.read_text())
    assert 1796 <= result["num_keys"] <= 1797  # an odd one is dropped in each epoch
    assert result["accuracy"] > 0.7


@pytest.mark.slow
def test_the_benchmark_runs_and_compares_all_that_is_installed() -> None:
    report = json.loads(run("-m", "benchmarks.cache", "--quick", "--json"))
    rows = {row["name"]: row for row in report["rows"]}
    assert set(rows) | set(report["not_installed"]) == {contender.name for contender in CONTENDERS}
    assert set(report["not_installed"]) == {contender.name for contender in CONTENDERS if missing(contender)}
    for row in rows.values():
        assert row["first_epoch_ms"] > row["later_epoch_ms"] / 2 > 0
    assert rows["bagua memory"]["speedup"] > 2

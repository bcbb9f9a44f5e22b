"""The end of a script: ranks leave with the right exit code, in time, whatever they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.launch.launching import ROOT

# What may be left behind at the end of a script that just ends.
ENDS = [
    "stagger",
    "stagger maybe-destroy",
    "stagger destroy groups",
    "groups stagger maybe-destroy",
    "dropped",
    "dropped groups stagger",
    "dropped destroy",
    "hook stagger",
]


def ended(size: int, *scenarios: str, timeout_s: float = 150) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.launch.forked_ranks", str(size), *scenarios],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert [t["scenario"] for t in trials] == list(scenarios)
    return trials


def rounds(times: int, ends: list[str]) -> list[str]:
    return [f"{ends[n % len(ends)]} seed={n}" for n in range(times)]


def test_ranks_that_just_end_exit_with_0() -> None:
    for trial in ended(2, *rounds(len(ENDS), ENDS)):
        assert set(trial["codes"]) == {0}, trial
        assert not any("terminate" in text or "Timeout" in text for text in trial["stderr"]), trial
        if "hook" in trial["scenario"]:
            assert all("hook ran" in text for text in trial["stderr"]), trial


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_just_end_exit_with_0_100_times(size: int) -> None:
    bad = [t for t in ended(size, *rounds(100, [*ENDS, "groups ddp"]), timeout_s=1400) if set(t["codes"]) != {0}]
    assert not bad


def test_other_ends() -> None:
    raised, stuck, code, killed, late = ended(
        2, "raise", "stuck raise wait", "exit3", "killed timeout=1", "late timeout=1"
    )
    assert raised["codes"] == [0, 1]
    assert "ValueError: boom" in raised["stderr"][1]
    assert stuck["codes"] == [0, 1], "it ends while its operation waits for the peer, which waits for its end"
    assert code["codes"] == [0, 3]
    assert killed["codes"] == [0, -9]
    assert late["codes"] == [0, 0], "one that trains until the other has ended is not waited for, and ends well"

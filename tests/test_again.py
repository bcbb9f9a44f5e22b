"""The second run of tests that have failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import again

ROOT = Path(__file__).parents[1]
ONCE = """
from pathlib import Path

def test_once():
    seen = Path(__file__).with_suffix(".seen")
    assert seen.exists() or seen.write_text("") > 0

def test_never():
    assert False

def test_always():
    pass
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tests of its own; the second run happens there."""
    (tmp_path / "test_some.py").write_text(ONCE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_first(*words: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.again", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, check=False).returncode


@pytest.mark.process
def test_a_test_that_passes_the_second_time_is_named(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_first("test_some.py::test_once", "test_some.py::test_always") == 1
    assert again.main() == 0
    assert "FLAKY: test_some.py::test_once failed once and passed the second time" in capfd.readouterr().out


@pytest.mark.process
def test_a_test_that_fails_twice_fails(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_first("test_some.py") == 1
    assert again.main() == 1
    out = capfd.readouterr().out
    assert "FLAKY" not in out and "1 failed, 1 passed" in out


@pytest.mark.process
def test_a_run_that_was_broken_off_fails(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One test has failed, and a third one was never run."""
    (here / "test_some.py").write_text(ONCE + "\ndef test_stops():\n    raise KeyboardInterrupt\n")
    assert run_first("test_some.py::test_once", "test_some.py::test_stops", "test_some.py::test_never") == 2
    assert list(json.loads((here / again.CACHE / "cache" / "lastfailed").read_text())) == ["test_some.py::test_once"]
    assert again.main() == 1
    assert "broken off" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("status", "failed", "message"),
    [
        (None, {"tests/test_a.py::test_1": True}, "broken off"),
        (0, {}, "something else than a test failed"),
        (3, {"tests/test_a.py::test_1": True}, "broken off"),
        (1, None, "not run again: 0 tests"),
        (1, {"tests/test_a.py": True}, "whole files failed"),
        (1, {f"tests/test_a.py::test_{i}": True for i in range(3)}, "not run again: 3 tests"),
    ],
)
def test_what_is_not_run_again(
    status: int | None,
    failed: dict[str, bool] | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("bagua/exitstatus", status), ("cache/lastfailed", failed)):
        if value is not None:
            (tmp_path / name).parent.mkdir()
            (tmp_path / name).write_text(json.dumps(value))
    assert again.main(tmp_path) == 1
    assert message in capsys.readouterr().out

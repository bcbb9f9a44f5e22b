"""The second run of tests that have failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import again

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


def run_first(*names: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *names], capture_output=True, check=False).returncode


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


@pytest.mark.parametrize(
    ("failed", "message"),
    [
        (None, "no test is known to have failed"),
        ({}, "no test is known to have failed"),
        ({"tests/test_a.py": True}, "whole files failed: tests/test_a.py"),
        ({f"tests/test_a.py::test_{i}": True for i in range(3)}, "more than 2 tests"),
    ],
)
def test_what_is_not_run_again(
    failed: dict[str, bool] | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = tmp_path / "lastfailed"
    if failed is not None:
        last.write_text(json.dumps(failed))
    assert again.main(last) == 1
    assert message in capsys.readouterr().out

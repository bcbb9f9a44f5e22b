"""A test that waits without end fails alone, and a worker that is lost is one failure: all other tests run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
ROOT = Path(__file__).parent.parent


def run_pytest(folder: Path, files: dict[str, str], *flags: str) -> str:
    """What pytest says of these files of tests, with the plugins of this suite that `flags` name."""
    for name, text in files.items():
        (folder / name).write_text(text)
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout-method=thread", *flags)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env = {**kept, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def failed(said: str) -> list[str]:
    """Names of tests in the summary."""
    return sorted(re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE))


WAITING = """
import threading
import pytest

def test_that_waits():
    threading.Event().wait()

def test_whose_clean_up_waits():
    try:
        threading.Event().wait()
    finally:
        threading.Event().wait()

@pytest.fixture
def never_ends():
    yield
    threading.Event().wait()

def test_whose_fixture_waits(never_ends):
    pass

def test_after_them():
    pass
"""


def test_waits_without_end_are_failures_of_their_tests(tmp_path: Path) -> None:
    early = "from tests import bounds\nbounds.SHARE = bounds.LEFT = 0.02\n"  # long before pytest-timeout
    files = {"conftest.py": early, "test_waits.py": WAITING}
    said = run_pytest(tmp_path, files, "-p", "tests.bounds", "--timeout=60")
    names = ("that_waits", "whose_clean_up_waits", "whose_fixture_waits")
    assert failed(said) == [f"test_waits.py::test_{name}" for name in names]
    assert "2 failed, 2 passed, 1 error" in said
    assert "test_that_waits: not done within 1.2 s" in said and "threading.Event().wait()" in said


DYING = """
import os

def test_before():
    pass

def test_that_ends_its_process():
    os._exit(1)

def test_after():
    pass
"""
FILES = {"test_a.py": "def test_1(): pass\ndef test_2(): pass\n", "test_b.py": DYING, "test_c.py": DYING}


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_lost_worker_had_left_is_run_and_what_it_was_lost_in_is_not(tmp_path: Path, workers: int) -> None:
    flags = (f"--numprocesses={workers}", "--dist=loadfile", "--no-loadscope-reorder", "-p", "tests.scheduling")
    said = run_pytest(tmp_path, FILES, *flags)
    assert failed(said) == [f"test_{each}.py::test_that_ends_its_process" for each in "bc"]
    assert "2 failed, 6 passed" in said

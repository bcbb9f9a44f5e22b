"""Programs without a new interpreter end as those with one do."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.forked_process import ForkedProcess, run_forked

pytestmark = pytest.mark.process
PROGRAM = """
import multiprocessing, os, signal, sys, warnings
from dataclasses import dataclass

@dataclass
class Answer:
    text: str

def answer(pipe):
    pipe.send(Answer("of a spawned process"))

if __name__ == "__main__":
    how, *rest = sys.argv[1:]
    print(how, rest, os.environ["SHOWN"], os.getcwd())
    print("an error", file=sys.stderr)
    if how == "code":
        sys.exit(3)
    if how == "words":
        sys.exit("what went wrong")
    if how == "raise":
        raise ValueError("boom")
    if how == "warn":
        warnings.warn("a warning")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "waits":
        signal.pause()
    if how == "spawns":
        ours, theirs = multiprocessing.Pipe()
        multiprocessing.get_context("spawn").Process(target=answer, args=(theirs,)).start()
        print(ours.recv().text if ours.poll(60) else "no answer")
"""


@pytest.mark.parametrize(
    ("how", "code", "error"),
    [
        ("ends", 0, "an error"),
        ("code", 3, "an error"),
        ("words", 1, "what went wrong"),
        ("raise", 1, "ValueError: boom"),
        ("warn", 1, "UserWarning: a warning"),
        ("killed", -signal.SIGKILL, "an error"),
        ("spawns", 0, "an error"),
    ],
)
def test_ends(fork_server: ForkServer, tmp_path: Path, how: str, code: int, error: str) -> None:
    (tmp_path / "a_program.py").write_text(PROGRAM)
    (tmp_path / "place").mkdir()
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "SHOWN": "shown"}
    command = [sys.executable, "-W", "error", "-m", "a_program", how, "x y"]
    done = run_forked(fork_server, command, env, tmp_path / "place", 100)
    assert done.returncode == code, done.stderr
    if how != "killed":  # which has not written its buffer
        assert done.stdout.startswith(f"{how} ['x y'] shown {tmp_path / 'place'}\n") and error in done.stderr
    assert how != "spawns" or done.stdout.endswith("\nof a spawned process\n")


def test_what_does_not_end_is_killed(fork_server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "a_program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "SHOWN": "shown"}
    command = [sys.executable, "-m", "a_program", "waits"]
    with pytest.raises(AssertionError, match=r"(?s)did not end within 0\.5 s"):
        run_forked(fork_server, command, env, tmp_path, 0.5)
    process = ForkedProcess(fork_server, command, env, tmp_path, (tmp_path / "out", tmp_path / "err"))
    assert process.poll() is None
    process.kill()
    assert process.wait(60) == process.poll() == -signal.SIGKILL

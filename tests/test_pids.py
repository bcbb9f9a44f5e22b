"""A process is killed by its number only if it is the one that is meant."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.pids import kill, runs


@pytest.mark.process
def test_a_number_that_is_another_process_s() -> None:
    command = [sys.executable, "-I", "-S", "-c", "print('up', flush=True); input()"]
    env = {**os.environ, "THE_TEST": "this one"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, **pipes) as process:  # pyright: ignore
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        assert runs(process.pid) and runs(process.pid, THE_TEST="this one")
        assert not runs(process.pid, THE_TEST="another one")
        kill(process.pid, THE_TEST="another one")
        assert process.poll() is None
        kill(process.pid, THE_TEST="this one")
        assert process.wait(60) == -9
    assert not runs(process.pid, THE_TEST="this one")

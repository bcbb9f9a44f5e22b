"""A rank as its launcher's child: its end, what it leaves behind, and whether it is stopped."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from bagua.distributed.rank_process import RankProcess, spawn
from tests.elastic.hosts import wait_for
from tests.pids import runs, state

pytestmark = pytest.mark.process

SLEEPS = "import time\nwhile True: time.sleep(0.001)"
# Starts a process that ignores SIGTERM and would outlive it.
PARENT = """
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RankProcess]]:
    made: list[RankProcess] = []

    def start(*argv: str) -> RankProcess:
        made.append(RankProcess(partial(spawn, argv), os.environ, tmp_path / str(len(made))))
        return made[-1]

    yield start
    for each in made:
        each.kill()


def times_run(pid: int) -> str:
    return Path(f"/proc/{pid}/schedstat").read_text().split()[-1]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: state(pid) == "T", "stop")


def test_a_stopped_rank_is_told_from_a_slowed_one(start: Callable[..., RankProcess]) -> None:
    """One that is stopped and goes on, again and again, may be found stopped at each look."""
    rank = start(sys.executable, "-c", SLEEPS)
    assert rank.stopped_s(0.0) == 0.0
    stop(rank.pid)
    assert [rank.stopped_s(now) for now in (0.5, 1.0, 1.5)] == [0.0, 0.5, 1.0]
    before = times_run(rank.pid)
    os.kill(rank.pid, signal.SIGCONT)
    wait_for(lambda: times_run(rank.pid) != before, "run")
    stop(rank.pid)
    assert [rank.stopped_s(now) for now in (2.0, 2.5)] == [0.0, 0.5]
    assert rank.stopped_s(10.0) == 0.0  # nobody looked: the launcher was stopped, too
    os.kill(rank.pid, signal.SIGCONT)
    wait_for(lambda: state(rank.pid) != "T", "continuation")
    assert rank.stopped_s(10.5) == 0.0


def test_what_a_rank_has_started_ends_with_it(start: Callable[..., RankProcess], tmp_path: Path) -> None:
    rank = start(sys.executable, "-c", PARENT, str(tmp_path / "child"))
    wait_for(lambda: rank.poll() is not None, "end")
    assert rank.poll() == -signal.SIGKILL and rank.failure().exitcode == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: not runs(child), "end of the child")


def test_a_program_that_does_not_exist(start: Callable[..., RankProcess], capfd: pytest.CaptureFixture[str]) -> None:
    rank = start("no-such-program")
    wait_for(lambda: rank.poll() is not None, "end")
    assert rank.poll() == 127 and "no-such-program: No such file or directory" in capfd.readouterr().err

"""Hosts of a fault-tolerant job on loopback: a launcher each, forked from one process that has imported torch.

The ranks train nothing. They begin and finish steps up to a number that the test sets, and write down what they see.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.fork_server import ForkServer
from tests.pids import kill, runs
from tests.ports import free_ports

LIMIT_S = 90.0
# Only closed connections count, so that a busy machine makes no difference.
DEAF_S = "30"

RANK = """
import json, os, sys, time
from pathlib import Path
from bagua.membership import Verdict
from bagua.membership.remote_seat import RemoteSeat
assert "torch" not in sys.modules
folder, seat, step, seen, fetched = Path(sys.argv[1]), RemoteSeat(), 0, None, 0
environment = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")]
while not (folder / "stop").exists():
    view = seat.view()
    if view is not None and view.rank is None and (folder / "fetches").exists():
        seat.wants_weights()
        view = seat.view()
        if view.rank is None and view.learns and seat.name in view.learners and view.epoch != fetched:
            fetched = view.epoch if seat.weights_fetched(view.epoch, view.step).name == "GRANTED" else 0
            step = view.step if fetched else step
    if view is not None and view.rank is not None:
        if step < view.step and seat.weights_fetched(view.epoch, view.step) is Verdict.GRANTED:
            step = view.step
        if step < int((folder / "target").read_text()) and seat.start_step(view.group, step) is Verdict.GRANTED:
            step += seat.finish_step(view.group, step) is Verdict.GRANTED
    now = [environment, seat.name, step, None if view is None else vars(view)]
    if now != seen:
        seen, partial = now, folder / f"{os.getpid()}.partial"
        partial.write_text(json.dumps(now))
        partial.rename(folder / f"{os.getpid()}.json")
    time.sleep(0.01)
sys.exit(int((folder / "stop").read_text()))
"""


@dataclass
class Seen:
    """What a rank has written."""

    pid: int
    environment: list[str]
    name: str
    step: int
    view: dict[str, Any] | None

    @property
    def members(self) -> list[str]:
        return [] if self.view is None else self.view["members"]


class Launched:
    """A launcher in a process of its own, that of host `at` of the list."""

    def __init__(self, pipe: Connection, folder: Path) -> None:
        self._pipe, self.folder = pipe, folder
        self.pid: int = pipe.recv()
        self._result: list[Any] = []

    def wait(self) -> int:
        """Its exit code, when nothing of it is left."""
        if not self._result:
            assert self._pipe.poll(LIMIT_S), f"the launcher has not ended; it wrote: {self.text()}"
            self._result = self._pipe.recv()
            assert self._result[1] == {}, f"threads are left: {self._result[1]}; the launcher wrote: {self.text()}"
        assert not self.ranks(), "a rank outlived its launcher"
        return self._result[0]

    def kill(self) -> None:
        """As if the host had lost power: the rank ends, too."""
        os.kill(self.pid, signal.SIGKILL)
        wait_for(lambda: not runs(self.pid) and not self.ranks(), "end of the rank of a killed launcher")

    def ranks(self) -> list[int]:
        """Processes of ranks that run."""
        return [pid for pid in map(int, (p.stem for p in self.folder.glob("*.json"))) if self._is_rank(pid)]

    def _is_rank(self, pid: int) -> bool:
        return runs(pid, TMPDIR=str(self.folder))

    def seen(self) -> Seen | None:
        """What the rank that runs now has seen."""
        for pid in self.ranks():
            return Seen(pid, *json.loads((self.folder / f"{pid}.json").read_text()))
        return None

    def all_seen(self) -> list[Seen]:
        """What each rank that runs now has seen, by local rank."""
        found = [Seen(pid, *json.loads((self.folder / f"{pid}.json").read_text())) for pid in self.ranks()]
        return sorted(found, key=lambda each: each.environment[-1])

    def all_members(self) -> list[Seen]:
        """As `all_seen`, or nothing while a rank of this host is missing that one of the others takes for a member."""
        found = self.all_seen()
        members = [sum(name.partition("/")[0] == each.name for name in each.members) for each in found]
        return found if max(members, default=0) <= len(found) else []

    def text(self) -> str:
        return (self.folder / "output").read_text()


class Hosts:
    """Launchers of one job.

    Args:
        server: imports torch once for all.
        folder: for everything.
        num: hosts in the list.
        flags: of `bagua run`, besides those of the rendezvous.
    """

    def __init__(self, server: ForkServer, folder: Path, num: int, *flags: str) -> None:
        self._server, self._folder, self._flags = server, folder, flags
        self.ports = free_ports(num)
        self.script = folder / "rank.py"
        self.script.write_text(RANK)
        self.all: list[Launched] = []

    def start(self, *flags: str, script: str | None = None, env: dict[str, str] | None = None) -> Launched:
        """A launcher takes the first port of the list that is free, so these are started one by one."""
        folder = self._folder / f"host{len(self.all)}"
        folder.mkdir()
        write(folder / "target", 3)
        endpoints = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        words = ["--fault-tolerant", "--rdzv-endpoint", endpoints, *self._flags, *flags, script or str(self.script)]
        pipe = self._server.fork(launch_here, [*words, str(folder)], str(folder), env or {})
        assert pipe.poll(LIMIT_S), "the process that imports torch does not answer"
        self.all.append(Launched(pipe, folder))
        return self.all[-1]

    def serves(self, at: int) -> bool:
        """Whether somebody listens at a port of the list."""
        import socket

        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.ports[at]), timeout=LIMIT_S).close()
            return True
        return False

    def start_all(self, *flags: str) -> list[Launched]:
        """One after the other, so that host i of the list is rank i."""
        for at in range(len(self.ports)):
            self.start(*flags)
            wait_for(lambda at=at: self.serves(at), "store of a launcher", self)
        self.await_step(3, self.all)
        return self.all

    def await_step(self, target: int, those: list[Launched]) -> None:
        """Let the ranks of these train up to a step, and wait until they have."""
        for each in those:
            write(each.folder / "target", target)

        def found() -> bool:
            return all((seen := each.all_members()) and {s.step for s in seen} == {target} for each in those)

        wait_for(found, "steps", self)

    def await_members(self, names: list[str], those: list[Launched]) -> None:
        """Wait until all ranks of these see just these train."""

        def found() -> bool:
            seen = [each.all_members() for each in those]
            return all(each and all(s.members == names for s in each) for each in seen)

        wait_for(found, f"view {names}", self)

    def stop(self, those: list[Launched], code: int = 0) -> None:
        """Let the ranks of these end."""
        for each in those:
            write(each.folder / "stop", code)

    def told(self) -> str:
        """What all have seen and written, for a test that fails."""
        return "\n".join(f"{each.all_seen()}\n{each.text()}" for each in self.all)

    def close(self) -> None:
        for each in self.all:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
            for pid in each.ranks():
                kill(pid, TMPDIR=str(each.folder))


def wait_for(found: Callable[[], bool], what: str, hosts: Hosts | None = None) -> None:
    end = time.monotonic() + LIMIT_S
    while not found():
        if time.monotonic() > end:
            told = hosts.told() if hosts is not None else ""
            raise AssertionError(f"no {what} within {LIMIT_S:g} s\n{told}")
        time.sleep(0.02)


def write(path: Path, value: int) -> None:
    """In one move: a rank may read it at any moment."""
    path.with_suffix(".new").write_text(str(value))
    path.with_suffix(".new").rename(path)


def launch_here(pipe: Connection, words: list[str], folder: str, env: dict[str, str]) -> None:
    """In a forked process: `bagua run`, with its output in a file."""
    import sys
    import tempfile
    import threading
    import traceback

    from bagua.cli.main import main

    output = os.open(f"{folder}/output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    for name in [name for name in os.environ if name.startswith(("BAGUA_", "PET_", "TORCHELASTIC_", "RANK", "WORLD_"))]:
        del os.environ[name]
    os.environ |= {"TMPDIR": folder, **env}
    tempfile.tempdir = None  # the server may have looked at TMPDIR already
    pipe.send(os.getpid())
    code = main(["run", *words])
    frames = sys._current_frames()
    left = [t for t in threading.enumerate() if t.name.startswith("bagua-")]
    pipe.send([code, {t.name: traceback.format_stack(frames[t.ident]) for t in left if t.ident in frames}])

"""Start a launcher in a process of its own, bounded, and see that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fork_server import ForkServer
from tests.forked_process import run_forked
from tests.pids import kill, runs

ROOT = Path(__file__).parent.parent.parent
RUN = ("-m", "bagua.cli.main", "run")
MODULE = ("-m", "bagua.distributed.run")  # with the defaults of the original
LAUNCH = ("-m", "bagua.distributed.launch")
# What a launch must not inherit from the launch that runs the tests.
_CLEAN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_", "PET_", "BAGUA_")

INIT = """
import os, sys, time
import torch, torch.distributed as dist
import bagua
bagua.init_process_group()
rank = dist.get_rank()
open(os.path.join(os.environ["PIDS"], str(os.getpid())), "w").close()
"""


@dataclass
class Ended:
    code: int
    out: str
    err: str
    seconds: float


class Launcher:
    """A launcher that runs; `wait` for its end, or `interrupt` it."""

    def __init__(
        self, tmp: Path, words: Sequence[str], env: Mapping[str, str] | None = None, before: Sequence[str] = ()
    ) -> None:
        self.pids = tmp / "pids"
        self.pids.mkdir(exist_ok=True)
        kept = _environment(tmp, self.pids)
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [*before, sys.executable, *words],
            cwd=tmp,
            env={**kept, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_ranks(self, count: int, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while len(list(self.pids.iterdir())) < count:
            assert self._process.poll() is None, self._process.communicate()
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)

    def hang_up(self) -> None:
        self._process.send_signal(signal.SIGHUP)

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        self._started = time.monotonic()
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 150) -> Ended:
        try:
            out, err = self._process.communicate(timeout=timeout_s)
        finally:
            self._process.kill()
            self._process.wait()
            orphans = _end_orphans(self.pids)
        assert not orphans, f"ranks outlived the launcher: {orphans}"
        return Ended(self._process.returncode, out, err, time.monotonic() - self._started)


def launch(tmp: Path, *words: str, env: Mapping[str, str] | None = None) -> Ended:
    """Run a launcher to its end."""
    return Launcher(tmp, words, env).wait()


def launch_forked(server: ForkServer, tmp: Path, *words: str, env: Mapping[str, str] | None = None) -> Ended:
    """The same without a new interpreter for the launcher, where its start and end are not what is tested."""
    pids, started = tmp / "pids", time.monotonic()
    pids.mkdir(exist_ok=True)
    try:
        done = run_forked(server, [sys.executable, *words], {**_environment(tmp, pids), **(env or {})}, tmp, 140)
    finally:
        orphans = _end_orphans(pids)
    assert not orphans, f"ranks outlived the launcher: {orphans}"
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


def script(tmp: Path, text: str, name: str = "script.py") -> str:
    path = tmp / name
    path.write_text(text)
    return str(path)


def _environment(tmp: Path, pids: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_CLEAN)}
    kept.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    path = os.pathsep.join(p for p in (str(ROOT), kept.get("PYTHONPATH", "")) if p)
    return {**kept, "PIDS": str(pids), "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp)}


def _end_orphans(pids: Path) -> list[int]:
    orphans = [pid for pid in map(int, (p.name for p in pids.iterdir())) if runs(pid, PIDS=str(pids))]
    for pid in orphans:
        kill(pid, PIDS=str(pids))
    return orphans

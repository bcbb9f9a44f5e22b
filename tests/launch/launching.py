"""Start a launcher in a process of its own, bounded, and see that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_CLEAN)}
        kept.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
        paths = [str(ROOT), kept.get("PYTHONPATH", "")]
        kept |= {
            "PIDS": str(self.pids),
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
            "OMP_NUM_THREADS": "1",
        }
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [*before, sys.executable, *words],
            cwd=tmp,
            env={**kept, "TMPDIR": str(tmp), **(env or {})},
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

    def interrupt(self) -> None:
        self._started = time.monotonic()
        self._process.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float = 150) -> Ended:
        try:
            out, err = self._process.communicate(timeout=timeout_s)
        finally:
            self._process.kill()
            self._process.wait()
            orphans = [pid for pid in map(int, (p.name for p in self.pids.iterdir())) if _runs(pid)]
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert not orphans, f"ranks outlived the launcher: {orphans}"
        return Ended(self._process.returncode, out, err, time.monotonic() - self._started)


def launch(tmp: Path, *words: str, env: Mapping[str, str] | None = None) -> Ended:
    """Run a launcher to its end."""
    return Launcher(tmp, words, env).wait()


def script(tmp: Path, text: str, name: str = "script.py") -> str:
    path = tmp / name
    path.write_text(text)
    return str(path)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"

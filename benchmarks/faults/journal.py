"""What a rank writes down: a line of JSON for each step, in a file of its own. Without torch."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["Journal", "resources"]

_EVERY_S = 2.0


class Journal:
    """Lines of one process. Times are those of CLOCK_MONOTONIC, which all hosts of an emulated cluster share.

    Args:
        folder: of the job.
    """

    def __init__(self, folder: Path) -> None:
        host = int(os.environ.get("BAGUA_LAB_HOST", "0"))
        path = folder / f"host{host}-{time.monotonic_ns()}.jsonl"
        self._file = path.open("w", buffering=1)
        self._looked = 0.0
        self.write(started=time.monotonic() - _age_s(), host=host, pid=os.getpid())

    def write(self, **facts: Any) -> None:
        """Add a line."""
        self._file.write(json.dumps(facts) + "\n")

    def close(self) -> None:
        """No line follows."""
        self._file.close()

    def ready(self) -> None:
        """The process could train from now on."""
        self.write(ready=time.monotonic())

    def joined(self, step: int, **more: Any) -> None:
        """It takes part."""
        self.write(joined=time.monotonic(), at_step=step, **more)

    def step(self, step: int, begin: float, *, rank: int, size: int, applied: bool, digest: int) -> None:
        """One attempt at a step has ended, and now and then what the process holds.

        Args:
            step: steps that were applied before it.
            begin: of the forward pass.
            applied: the step counts.
            digest: of the weights after it.
        """
        now = time.monotonic()
        self.write(step=step, begin=begin, end=now, rank=rank, size=size, applied=applied, digest=digest)
        if now - self._looked > _EVERY_S:
            self._looked = now
            names = sorted(thread.name for thread in threading.enumerate())
            launcher = {"launcher": resources(str(os.getppid())), "launcher_pid": os.getppid()}
            self.write(resources=resources("self"), **launcher, at=now, names=names)

    def finished(self, step: int, loss: float, own_loss: float | None = None) -> None:
        """The job has ended by itself.

        Args:
            loss: of the mean of the replicas, where they differ.
            own_loss: of this rank's own weights before it; None: the same.
        """
        self.write(finished=time.monotonic(), at_step=step, loss=loss, own_loss=loss if own_loss is None else own_loss)


def resources(pid: str) -> dict[str, int]:
    """Threads, descriptors, sockets among them, and resident memory in KB of a process."""
    root = Path("/proc", pid)
    try:
        status = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines() if ":" in line)
        open_files = list((root / "fd").iterdir())
    except OSError:
        return {}
    sockets = 0
    for each in open_files:
        try:
            sockets += os.readlink(each).startswith("socket:")
        except OSError:
            continue
    return {
        "threads": int(status["Threads"]),
        "descriptors": len(open_files),
        "sockets": sockets,
        "memory_kb": int(status["VmRSS"].split()[0]),
    }


def _age_s() -> float:
    """Seconds since this process was started."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started

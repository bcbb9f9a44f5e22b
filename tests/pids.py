"""Processes by number. Linux gives the number of one that has ended to another: often only 32,768 are given out."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

__all__ = ["kill", "runs", "state"]


def state(pid: int) -> str:
    """What the kernel says of a process: "T" if it is stopped, "Z" if it has ended and its parent does not know yet.

    Raises:
        FileNotFoundError, ProcessLookupError: there is none.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def runs(pid: int, **started_with: str) -> bool:
    """Whether a process has this number, and was started with these variables in its environment, and has not ended."""
    try:
        ended = state(pid) == "Z"
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if started_with else []
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return not ended and all(f"{name}={value}".encode() in environment for name, value in started_with.items())


def kill(pid: int, **started_with: str) -> None:
    """End the process of this number, if it is the one that is meant; see `runs`."""
    if runs(pid, **started_with):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

"""Finds the processes of one rank, by the `LOCAL_RANK` that its launcher has given it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

__all__ = ["kill_rank"]


def kill_rank(local_rank: int, among: Iterable[int] | None = None) -> None:
    """Kill the processes with this `LOCAL_RANK` in their environment (SIGKILL).

    Args:
        local_rank: of the rank.
        among: numbers of the processes to look at; None: all of this process's namespace.

    Raises:
        ProcessLookupError: there is none.
    """
    wanted = f"LOCAL_RANK={local_rank}".encode()
    looked = [int(each) for each in os.listdir("/proc") if each.isdigit()] if among is None else among
    found = False
    for pid in looked:
        try:
            if wanted not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                continue
            number = pid if among is not None else _number_here(pid)
            if number is not None:
                os.kill(number, signal.SIGKILL)
                found = True
        except (OSError, IndexError):
            continue  # it has ended, or is another user's
    if not found:
        raise ProcessLookupError(f"no process has LOCAL_RANK={local_rank}")


def _number_here(pid: int) -> int | None:
    """What a process of /proc is called in this namespace; None if it is in another one, whose /proc is seen here."""
    if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
        return None
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])

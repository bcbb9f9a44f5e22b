"""Finds the processes of one rank, by the `LOCAL_RANK` that its launcher has given it.

A rank that was forked (`bagua run --preload`) shows the environment of the process that it was forked from. It is
called bagua-rank-N.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

__all__ = ["kill_rank"]

_STOP_S, _DEATH_S, _POLL_S = 5.0, 5.0, 0.002


def kill_rank(local_rank: int, among: Callable[[], Iterable[int]] | None = None) -> None:
    """Kill the processes with this `LOCAL_RANK` in their environment, or that are called so (SIGKILL).

    All of them are stopped first, so that none of them starts another one meanwhile, and so that their launcher does
    not start the rank again before all are found. Returns when they are dead, but waits 5 s at most: the kernel may
    hold one for longer.

    Args:
        local_rank: of the rank.
        among: returns numbers of the processes to look at; None: all of this process's namespace.

    Raises:
        ProcessLookupError: there is none.
    """

    def alive(known: Mapping[int, int]) -> dict[int, int]:
        looked = [int(each) for each in os.listdir("/proc") if each.isdigit()] if among is None else among()
        return _of_rank(local_rank, known, looked, here=among is None)

    deadline = time.monotonic() + _STOP_S
    found: dict[int, int] = {}
    stopped: set[int] = set()
    while True:
        moving = any(_moves(pid) for pid in stopped)  # one that has not noticed the signal yet may be starting another
        new = {pid: number for pid, number in alive(found).items() if pid not in found}
        found |= new
        stopped |= {pid for pid, number in new.items() if _signal(number, signal.SIGSTOP)}
        if not new and (not moving or time.monotonic() > deadline):
            break
    if not stopped:
        raise ProcessLookupError(f"no process has LOCAL_RANK={local_rank}")
    for pid in stopped:
        _signal(found[pid], signal.SIGKILL)
    deadline = time.monotonic() + _DEATH_S
    while stopped & alive({}).keys() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _of_rank(local_rank: int, known: Mapping[int, int], pids: Iterable[int], here: bool) -> dict[int, int]:
    """Processes of `pids` of this rank, and children of `known` ones.

    Args:
        here: in this process's namespace only.

    Returns:
        for each number in /proc the number that signals take.
    """
    found: dict[int, int] = {}
    for pid in pids:
        try:
            # A process that is just beginning another program shows no environment.
            if int(_stat(pid)[1]) in known or _belongs(pid, local_rank):
                number = _number_here(pid) if here else pid
                found |= {} if number is None else {pid: number}
        except (OSError, IndexError):
            continue  # it has ended, or is another user's
    return found


def _belongs(pid: int, local_rank: int) -> bool:
    line = f"LOCAL_RANK={local_rank}".encode()
    return (
        line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        or Path(f"/proc/{pid}/comm").read_text() == f"bagua-rank-{local_rank}\n"
    )


def _moves(pid: int) -> bool:
    """Neither stopped nor ended."""
    try:
        return _stat(pid)[0] not in "TtZX"
    except (OSError, IndexError):
        return False


def _stat(pid: int) -> list[str]:
    """State, parent and more."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _signal(number: int, what: signal.Signals) -> bool:
    try:
        os.kill(number, what)
    except OSError:
        return False  # it has ended, or is another user's
    return True


def _number_here(pid: int) -> int | None:
    """What a process of /proc is called in this namespace; None if it is in another one, whose /proc is seen here."""
    if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
        return None
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])

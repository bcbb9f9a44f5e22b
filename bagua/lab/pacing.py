"""Pacing mode, without root or user namespaces: limits the bandwidth of each TCP socket, and nothing else.

A library that is preloaded into the processes sets SO_MAX_PACING_RATE at connect and accept. All hosts are this
machine. Not emulated: latency, jitter, loss, queues, links that connections share, cables that are pulled.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bagua.lab.errors import LabError
from bagua.lab.host import Host
from bagua.lab.link import Link, bits_per_second
from bagua.lab.rank_processes import kill_rank
from bagua.lab.report import HostReport, Report

__all__ = ["Pacing"]

LIBRARY = Path(__file__).with_name("_pacing.so")
_ENTER = str(Path(__file__).with_name("enter.py"))
_logger = logging.getLogger("bagua")


class Pacing:
    """Limits each socket to the link's bandwidth, or to its share among the peers."""

    mode = "pacing"
    wire = "loopback"
    user_namespace = False
    interface = "lo"
    congestion = ""
    alive = True

    def __init__(self, folder: Path, num_hosts: int, link: Link, divide: bool) -> None:
        self._folder = folder
        self.addresses = ["127.0.0.1"] * num_hosts
        self._rate = _rate(link)
        if self._rate and divide:
            self._rate = max(self._rate // max(num_hosts - 1, 1), 1000)
        self._roots: list[list[int]] = [[] for _ in range(num_hosts)]
        if self._rate and not LIBRARY.exists():
            raise LabError(
                f"the pacing library of the lab is not built ({LIBRARY.name} is missing): install a C++17 compiler "
                "and reinstall bagua, or run `python setup.py build_ext --inplace`"
            )
        lost = [name for name in ("latency", "jitter", "loss") if getattr(link, name)]
        _logger.warning(
            "bagua lab: pacing mode: every TCP socket gets the full bandwidth; sockets do not share a link%s%s",
            f"; not emulated: {', '.join(lost)}" if lost else "",
            "; a queue is not emulated either" if link.queue_bytes is not None else "",
        )

    def environment(self) -> dict[str, str]:
        """Preloads the library."""
        if not self._rate:
            return {}
        earlier = os.environ.get("LD_PRELOAD")
        return {
            "LD_PRELOAD": f"{LIBRARY}:{earlier}" if earlier else str(LIBRARY),
            "BAGUA_LAB_PACING_BYTES": str(self._rate // 8),
        }

    def enter(self, index: int, argv: Sequence[str], cwd: str) -> list[str]:
        """The command that runs `argv` and ends all that comes of it with itself."""
        return [sys.executable, "-I", "-S", _ENTER, "--here", f"{os.getpid()}:{self._folder}", cwd, *argv]

    def started(self, index: int, pid: int) -> None:
        """Keeps what runs on a host."""
        self._roots[index].append(pid)

    def set_link(self, index: int, link: Link) -> None:
        """Not possible."""
        raise LabError("set_link needs namespaces: in pacing mode a socket keeps the rate it began with")

    def set_cut(self, index: int, cut: bool) -> None:
        """Not possible."""
        raise LabError("cut and restore need namespaces: in pacing mode there is no link to cut")

    def set_blocked(self, sender: int, receiver: int, blocked: bool) -> None:
        """Not possible."""
        raise LabError("partition needs namespaces: in pacing mode there are no frames to lose")

    def ask(self, index: int, line: str) -> None:
        """`pause`, `resume` and `kill` reach the processes one by one; `slow` is in the speed file only.

        Raises:
            LabError: `kill_rank` finds no such rank.
        """
        if line.startswith("kill_rank "):
            try:
                return kill_rank(int(line.split()[1]), partial(_descendants, self._roots[index]))
            except ProcessLookupError as error:
                raise LabError(str(error)) from None
        number = {"pause": signal.SIGSTOP, "resume": signal.SIGCONT, "kill": signal.SIGKILL}.get(line)
        if number is None:
            return
        for pid in _descendants(self._roots[index]):
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue

    def report(self, hosts: Sequence[Host], wall_s: float) -> Report:
        """Nothing is counted."""
        hosts_seen = tuple(HostReport(host.name, 0, 0) for host in hosts)
        return Report(hosts_seen, wall_s, late_frames=None, late_mean_ms=None, late_max_ms=None, wire=self.wire)

    def close(self) -> None:
        """Ends all processes."""
        for roots in self._roots:
            for pid in roots:
                if _parent(pid) == os.getpid():  # else it has ended, and the number may be another's
                    os.kill(pid, signal.SIGTERM)
        self._roots = [[] for _ in self._roots]


def _rate(link: Link) -> int:
    given = [bits_per_second(rate) for rate in (link.bandwidth, link.flow_bandwidth) if rate is not None]
    return min(given, default=0)


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None


def _descendants(roots: Sequence[int]) -> list[int]:
    """All below the roots, which are wrappers and stay out of it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent(int(entry))) is not None:
            children.setdefault(parent, []).append(int(entry))
    found, queue = [], list(roots)
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found

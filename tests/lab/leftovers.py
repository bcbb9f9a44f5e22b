"""What a cluster could leave behind on the machine."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from bagua.lab import Cluster


def processes_in(namespaces: set[str]) -> list[int]:
    """Ids of the processes that live in one of these network namespaces."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.readlink(f"/proc/{entry}/ns/net") in namespaces:
                    found.append(int(entry))
            except OSError:
                continue
    return found


def descendants(root: int) -> list[int]:
    """Ids of all processes below `root`, and its own."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def mine(cluster: Cluster) -> set[str]:
    """The network namespaces of a cluster, the switch's too."""
    pids = [process for pid in supervisors(cluster.folder) for process in descendants(pid)]
    return {os.readlink(f"/proc/{pid}/ns/net") for pid in pids} - {os.readlink("/proc/self/ns/net")}


def supervisors(folder: Path) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and str(folder).encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.append(int(entry))
        except OSError:
            continue
    return found


def devices() -> list[tuple[int, str]]:
    """Network devices of the machine itself."""
    return socket.if_nameindex()


def assert_nothing_left(namespaces: set[str], folder: Path) -> None:
    """No process of the cluster, hence none of its namespaces and devices; no folder. Waits up to 10 s."""
    assert namespaces, "the cluster had namespaces to look for"
    within(60, lambda: not processes_in(namespaces) and not folder.exists())
    assert processes_in(namespaces) == []
    assert not folder.exists()
    assert not supervisors(folder)
    mounts = Path("/proc/self/mountinfo").read_text()
    assert not [name for name in namespaces if name in mounts], "a mount would keep a namespace alive"


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Waits for it; true if it came."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())

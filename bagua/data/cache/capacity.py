"""Default capacity of a cache in memory and on disk."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_memory_bytes", "check_capacity", "disk_room_bytes"]

_MIN_CAPACITY = 1 << 20
_RESERVED = 0.05
_RESERVED_BYTES = 1 << 30


def check_capacity(capacity_per_node: int | None) -> None:
    """Check that a capacity is an integer of at least 1 MiB.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is below 1 MiB.
    """
    if capacity_per_node is None:
        return
    if isinstance(capacity_per_node, bool) or not isinstance(capacity_per_node, int):
        raise TypeError(f"capacity_per_node: expected bytes as int, got {type(capacity_per_node).__name__}")
    if capacity_per_node < _MIN_CAPACITY:
        raise ValueError(f"capacity_per_node: expected at least {_MIN_CAPACITY} bytes, got {capacity_per_node}")


def available_memory_bytes() -> int:
    """Memory that this process could still take: the machine's, or its control group's if that is less."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        return max(0, min(free, limit - used))
    except (OSError, ValueError):  # no control groups, or "max": no limit
        return free


def disk_room_bytes(path: str | Path) -> int:
    """Bytes that may be written to the file system of `path` while a twentieth of it (at most 1 GiB) stays free."""
    stat = os.statvfs(path)
    reserved = min(_RESERVED_BYTES, int(stat.f_blocks * stat.f_frsize * _RESERVED))
    return max(0, stat.f_bavail * stat.f_frsize - reserved)

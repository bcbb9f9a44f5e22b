"""What the kernel counts: bytes on this host's network device, how busy the cores are, memory of this process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

__all__ = ["Busy", "busy", "forget_peak", "peak_bytes", "resident_bytes", "sent_bytes", "waited_s"]


class Busy(NamedTuple):
    """Seconds (in ticks) of all cores since the machine started."""

    working: int
    total: int
    stolen: int = 0

    def share_since(self, earlier: Busy) -> float:
        """Part of all cores' time that was not idle, 0 to 1."""
        total = self.total - earlier.total
        return (self.working - earlier.working) / total if total > 0 else 0.0

    def stolen_since(self, earlier: Busy) -> float:
        """Part of all cores' time in which a virtual machine's host ran others, 0 to 1."""
        total = self.total - earlier.total
        return (self.stolen - earlier.stolen) / total if total > 0 else 0.0


def busy() -> Busy:
    """Read the whole machine's, whatever namespace this is."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return Busy(sum(ticks) - ticks[3] - ticks[4], sum(ticks), ticks[7])  # less idle, waiting for disks; steal


def waited_s() -> float:
    """Seconds in which threads of this process that still live were ready to run and had no core."""
    total_ns = 0
    for thread in Path("/proc/self/task").iterdir():
        try:
            total_ns += int((thread / "schedstat").read_text().split()[1])
        except (OSError, IndexError):  # it has ended just now, or the kernel does not count
            continue
    return total_ns / 1e9


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most of it since the process began, or since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Have `peak_bytes` begin anew; without effect where the kernel does not allow it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return 0


def sent_bytes(interface: str) -> int | None:
    """Bytes that left through `interface`, with one set of headers per frame of up to 64 KB; None without a device."""
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    return None

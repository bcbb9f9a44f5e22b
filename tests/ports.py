"""Free TCP ports of this host that nobody is given by chance."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_dice = random.SystemRandom()


def free_ports(num: int) -> list[int]:
    """Ports of loopback that are free and lie outside the range that the kernel gives out by itself.

    A port that `bind` to 0 finds can belong to any connection of this host by the time a server listens there.
    """
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768
    probes: list[socket.socket] = []
    try:
        for _ in range(1000):
            probe = socket.socket()
            try:
                probe.bind(("127.0.0.1", _dice.randrange(10000, first) if first > 11000 else 0))
            except OSError:
                probe.close()
                continue
            probes.append(probe)
            if len(probes) == num:
                return [each.getsockname()[1] for each in probes]
        raise AssertionError(f"no {num} free ports below {first}")
    finally:
        for probe in probes:
            probe.close()


def free_port() -> int:
    """One of `free_ports`."""
    return free_ports(1)[0]

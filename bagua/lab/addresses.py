"""Choice of a private network that this machine does not use."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

__all__ = ["free_network"]


def free_network() -> str:
    """The first three numbers of a /24 in 10.0.0.0/8 to which the machine has no route but the default one.

    The hosts have network namespaces of their own, so any would work; but an address in a log should not be
    that of a real machine.
    """
    routes = []
    table = Path("/proc/net/route")
    for line in table.read_text().splitlines()[1:] if table.exists() else ():
        fields = line.split()
        destination, mask = (struct.unpack("=I", bytes.fromhex(fields[i]))[0] for i in (1, 7))
        if mask:
            routes.append((socket.ntohl(destination), socket.ntohl(mask)))
    for second in range(77, 77 + 256):
        network = f"10.{second % 256}.0"
        number = struct.unpack("!I", socket.inet_aton(f"{network}.0"))[0]
        if not any((number ^ destination) & mask & 0xFFFFFF00 == 0 for destination, mask in routes):
            return network
    return "10.77.0"

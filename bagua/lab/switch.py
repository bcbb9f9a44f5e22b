"""The switch of a cluster without a relay: a veth pair to each host, a token bucket at either end of it.

It routes instead of bridging: where a frame is routed the kernel takes it from the account of the socket that sent it,
as a network card does with what has left the host. Over a bridge what waits in the switch would still count as unsent,
the sockets would hold back more, and the switch would hardly ever have to drop.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua.lab import kernel, token_bucket
from bagua.lab.errors import LabError

__all__ = ["BRIDGE", "Switch", "make_bridge", "make_pair", "port_name"]

BRIDGE = "switch"
_UNPLUGGED = bytes((0x02, 0xBA, 0x67, 0x76, 0xFF, 0xFF))  # no host's address


def port_name(index: int) -> str:
    """The switch's end of the cable to a host."""
    return f"port{index}"


def make_pair(index: int, interface: str, pid: int) -> None:
    """The cable: a veth pair between this network namespace and that of process `pid`.

    Raises:
        LabError: if the kernel has no veth, or does not allow it.
    """
    here = port_name(index)
    try:
        kernel.make_veth(here, interface, pid)
        silent = Path(f"/proc/sys/net/ipv6/conf/{here}/disable_ipv6")
        if os.access(silent, os.W_OK):
            silent.write_text("1")
        kernel.up(here)
    except OSError as error:
        missing = error.errno in (errno.EOPNOTSUPP, errno.ENODEV)
        raise LabError(f"cannot make a veth pair: {'the kernel has no veth devices' if missing else error}") from error


def make_bridge(interfaces: Sequence[str], pids: Sequence[int]) -> None:
    """Joins the hosts without limits."""
    kernel.make_bridge(BRIDGE)
    for index, (interface, pid) in enumerate(zip(interfaces, pids, strict=True)):
        make_pair(index, interface, pid)
        kernel.add_to_bridge(BRIDGE, port_name(index))


class Switch:
    """Lives in the supervisor's network namespace.

    Args:
        hosts: interface, address and mac of each.
        pids: their holders.
        links: bandwidth (bit/s, 0: none) and queue (bytes, 0: endless) of each host's link.

    Raises:
        LabError: if the kernel has no veth.
        OSError: if it cannot limit or route.
    """

    def __init__(self, hosts: Sequence[dict[str, Any]], pids: Sequence[int], links: Sequence[tuple[int, int]]) -> None:
        self._macs = [bytes.fromhex(host["mac"]) for host in hosts]
        self._cut_since: dict[int, int] = {}
        self._cut_drops = [0] * len(hosts)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        for index, (host, pid) in enumerate(zip(hosts, pids, strict=True)):
            make_pair(index, host["interface"], pid)
            kernel.set_mac(port_name(index), self._macs[index])
            kernel.point_to_point(port_name(index))
            kernel.add_route(host["address"], port_name(index))
            self.do_limit(index, *links[index])

    def answer(self, words: Sequence[str]) -> str:
        """What a line from the cluster asks for: "ok", numbers, or the error."""
        try:
            return getattr(self, "do_" + words[0])(*(int(word) for word in words[1:])) or "ok"
        except (OSError, ValueError) as error:
            return str(error)

    def do_limit(self, index: int, bits_per_s: int, queue_bytes: int) -> None:
        """What goes to the host."""
        token_bucket.limit(port_name(index), bits_per_s, queue_bytes or token_bucket.ENDLESS_BYTES)

    def do_cut(self, index: int) -> None:
        """Neither end takes the frames of the other any more, and no carrier is lost."""
        self._cut_since.setdefault(index, self._frames(index))
        kernel.set_mac(port_name(index), _UNPLUGGED)

    def do_restore(self, index: int) -> None:
        """Both do again."""
        kernel.set_mac(port_name(index), self._macs[index])
        if index in self._cut_since:
            self._cut_drops[index] += self._frames(index) - self._cut_since.pop(index)

    def do_drops(self, index: int) -> str:
        """Frames lost to a full queue, and to cuts."""
        since = self._cut_since.get(index)
        cut = self._cut_drops[index] + (0 if since is None else self._frames(index) - since)
        return f"{token_bucket.drops(port_name(index))} {cut}"

    @staticmethod
    def _frames(index: int) -> int:
        """That have come from the host or gone to it."""
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == port_name(index):
                fields = numbers.split()
                return int(fields[1]) + int(fields[9])
        return 0

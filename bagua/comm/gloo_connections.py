"""The TCP connections of a gloo group, so that they can be closed while a thread is blocked in a collective.

gloo has no abort: a collective whose peer is silent returns at the timeout. Shutting down its sockets ends it at once.
They are found by address: in the store, gloo publishes where each rank listens, and one end of every connection is
such an address.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["GlooConnections"]

_FDS = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd")

Address = tuple[str, int]


class GlooConnections:
    """The addresses at which the ranks of one group listen, and the sockets of this process that belong to them."""

    def __init__(self) -> None:
        self._listeners: set[Address] = set()
        self._offset: int | None = None  # of the `sockaddr` in what gloo publishes; it differs between versions

    def published(self, value: bytes | str) -> None:
        """What gloo writes to the store for this rank: it holds an address at which this process listens."""
        data = value.encode("latin-1") if isinstance(value, str) else bytes(value)
        ports = _ports_listened_at()
        for offset in range(len(data)):
            address = _address_at(data, offset)
            if address is not None and address[1] in ports:
                self._offset = offset
                self._listeners.add(address)
                return

    def found(self, value: bytes | str) -> None:
        """What it reads of another rank."""
        data = value.encode("latin-1") if isinstance(value, str) else bytes(value)
        address = None if self._offset is None else _address_at(data, self._offset)
        if address is not None:
            self._listeners.add(address)

    def shut_down(self) -> int:
        """Shut the sockets down: whoever is blocked on them, here and at the peers, gets an error. Returns how many.

        Of a group whose ranks are threads of one process this takes the connections of all of them.
        """
        found = 0
        for sock in _sockets():
            with contextlib.suppress(OSError, ValueError):
                if self._owns(sock):
                    sock.shutdown(socket.SHUT_RDWR)
                    found += 1
        return found

    def _owns(self, sock: socket.socket) -> bool:
        ends = [sock.getsockname()[:2], sock.getpeername()[:2]]  # a listener has no peer and is left alone
        return any((str(ipaddress.ip_address(host.partition("%")[0])), port) in self._listeners for host, port in ends)


def _ports_listened_at() -> set[int]:
    return {s.getsockname()[1] for s in _sockets() if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def _sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, each as a duplicate: its number may be reused at any time."""
    for name in os.listdir(_FDS):
        try:
            number = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            sock = socket.socket(fileno=number)
        except OSError:  # no socket; it stays open then
            os.close(number)
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock


def _address_at(data: bytes, offset: int) -> Address | None:
    """Host and port of the `sockaddr` that begins there; None if there is none."""
    family = int.from_bytes(data[offset : offset + 2], sys.byteorder)
    port = int.from_bytes(data[offset + 2 : offset + 4], "big")
    if family == socket.AF_INET and port and len(data) >= offset + 8:
        return str(ipaddress.ip_address(data[offset + 4 : offset + 8])), port
    if family == socket.AF_INET6 and port and len(data) >= offset + 24:
        return str(ipaddress.ip_address(data[offset + 8 : offset + 24])), port
    return None

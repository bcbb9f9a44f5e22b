"""The TCP connections of a gloo group, so that they can be closed while a thread is blocked in a collective.

gloo has no abort: a collective whose peer is silent returns at the timeout. Shutting down its sockets ends it at once.
They are found by address: in the store, gloo publishes where each rank listens, and one end of every connection is
such an address. Linux only; elsewhere nothing is found.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["GlooConnections"]

_FDS = Path("/proc/self/fd")
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_LISTENING = "0A"

Address = tuple[str, int]


class GlooConnections:
    """The addresses at which the ranks of one group listen, and the sockets of this process that belong to them.

    Attributes:
        own: the host address at which this rank listens; None until it is found.
    """

    def __init__(self) -> None:
        self.own: str | None = None
        self._listeners: set[Address] = set()
        self._offset: int | None = None  # of the `sockaddr` in what gloo publishes; it differs between versions

    def published(self, value: bytes | str) -> None:
        """What gloo writes to the store for this rank: it holds an address at which this process listens."""
        data = value.encode("latin-1") if isinstance(value, str) else bytes(value)
        inodes = set(_own_sockets().values())
        ports = {row.local[1] for row in _tcp_sockets() if row.listens and row.inode in inodes}
        for offset in range(len(data)):
            address = _address_at(data, offset)
            if address is not None and address[1] in ports:
                self._offset, self.own = offset, address[0]
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
        ours = {r.inode for r in _tcp_sockets() if not r.listens and not self._listeners.isdisjoint((r.local, r.peer))}
        return sum(_shut_down(fd, inode) for fd, inode in _own_sockets().items() if inode in ours)


class _Row(NamedTuple):
    """A TCP socket of this host."""

    local: Address
    peer: Address
    listens: bool
    inode: int


def _tcp_sockets() -> Iterator[_Row]:
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            yield _Row(_address_in(words[1]), _address_in(words[2]), words[3] == _LISTENING, int(words[9]))


def _address_in(text: str) -> Address:
    """`0100007F:1F90` is 127.0.0.1:8080: 32-bit words in the order of this machine, and the port."""
    address, _, port = text.partition(":")
    words = [int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8)]
    return _plain(b"".join(words)), int(port, 16)


def _plain(packed: bytes) -> str:
    """An address as text; an IPv4 address that is mapped into IPv6 as IPv4."""
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _own_sockets() -> dict[int, int]:
    """Descriptors of this process that are sockets, with their inodes."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_FDS):
            with contextlib.suppress(OSError):  # closed meanwhile
                link = os.readlink(_FDS / name)
                if link.startswith("socket:["):
                    found[int(name)] = int(link[8:-1])
    return found


def _shut_down(fd: int, inode: int) -> bool:
    """Shut a socket down, unless its descriptor stands for another one by now."""
    try:
        twin = os.dup(fd)
    except OSError:
        return False
    about = os.fstat(twin)
    if not stat.S_ISSOCK(about.st_mode) or about.st_ino != inode:
        os.close(twin)
        return False
    with socket.socket(fileno=twin) as sock, contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
        return True
    return False


def _address_at(data: bytes, offset: int) -> Address | None:
    """Host and port of the `sockaddr` that begins there; None if there is none."""
    family = int.from_bytes(data[offset : offset + 2], sys.byteorder)
    port = int.from_bytes(data[offset + 2 : offset + 4], "big")
    if family == socket.AF_INET and port and len(data) >= offset + 8:
        return _plain(data[offset + 4 : offset + 8]), port
    if family == socket.AF_INET6 and port and len(data) >= offset + 24:
        return _plain(data[offset + 8 : offset + 24]), port
    return None

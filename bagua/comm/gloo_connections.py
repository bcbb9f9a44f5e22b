"""The TCP connections of a gloo group, so that they can be closed while a thread is blocked in a collective.

gloo has no abort: a collective whose peer is silent returns at the timeout. Shutting down its sockets ends it at once.
They are found by address: in the store, gloo publishes where each rank listens, and one end of every connection is
such an address. Linux only; elsewhere nothing is found.

Descriptors are asked for their addresses through libc. A `socket.socket` made of a descriptor would make the connection
non-blocking for all who use it where `socket.setdefaulttimeout` is in force. The tables of the kernel in
/proc/self/net hold all connections of the host and take milliseconds; they are read only for a connection that is still
being made, which has no name for its other end yet.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import stat
import sys
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["GlooConnections"]

_FDS = "/proc/self/fd"
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_CONNECTING = "02"  # SYN_SENT
_SO_ACCEPTCONN = 30
_STREAM = int(socket.SOCK_STREAM)
_SOCKADDR = 128  # bytes of a `sockaddr_storage`

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
        ports = {address[1] for fd in _own_sockets() if _listens(fd) and (address := _local(fd)) is not None}
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
        sockets, connecting = _own_sockets(), set[int | None]()
        if any(_peer(fd) is None and _local(fd) is not None and not _listens(fd) for fd in sockets):
            connecting = {inode for inode, peer in _connecting() if peer in self._listeners}
        return sum(self._cut(fd, connecting) for fd in sockets)

    def _belongs(self, fd: int, connecting: Container[int | None]) -> bool:
        """Whether this is a connection of the group.

        Args:
            connecting: inodes of those that are being made.
        """
        known = not self._listeners.isdisjoint((_local(fd), _peer(fd))) or _inode(fd) in connecting
        return known and not _listens(fd)

    def _cut(self, fd: int, connecting: Container[int | None]) -> bool:
        if not self._belongs(fd, connecting):
            return False
        try:
            twin = os.dup(fd)  # it may stand for another one by now; this one stays what it is
        except OSError:
            return False
        try:
            return self._belongs(twin, connecting) and _libc().shutdown(twin, socket.SHUT_RDWR) == 0
        finally:
            os.close(twin)


def _connecting() -> Iterator[tuple[int, Address]]:
    """Inode and peer of the connections of this host that are being made."""
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _CONNECTING:
                yield int(words[9]), _address_in(words[2])


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


def _own_sockets() -> list[int]:
    """Descriptors of this process that are sockets of TCP."""
    try:
        names = os.listdir(_FDS)
    except OSError:
        return []
    return [fd for fd in map(int, names) if _inode(fd) is not None and _option(fd, socket.SO_TYPE) == _STREAM]


def _inode(fd: int) -> int | None:
    """Of a socket; None if it is something else, or closed."""
    try:
        about = os.fstat(fd)
    except OSError:
        return None
    return about.st_ino if stat.S_ISSOCK(about.st_mode) else None


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def _option(fd: int, name: int) -> int | None:
    value, size = ctypes.c_int(), ctypes.c_uint32(4)
    failed = _libc().getsockopt(fd, socket.SOL_SOCKET, name, ctypes.byref(value), ctypes.byref(size))
    return None if failed else value.value


def _listens(fd: int) -> bool:
    return _option(fd, _SO_ACCEPTCONN) == 1


def _local(fd: int) -> Address | None:
    return _name(fd, "getsockname")


def _peer(fd: int) -> Address | None:
    return _name(fd, "getpeername")


def _name(fd: int, call: str) -> Address | None:
    """One end of a connection; None if it has no address of the internet."""
    buffer, size = ctypes.create_string_buffer(_SOCKADDR), ctypes.c_uint32(_SOCKADDR)
    failed = getattr(_libc(), call)(fd, buffer, ctypes.byref(size))
    return None if failed else _address_at(buffer.raw[: size.value], 0)


def _address_at(data: bytes, offset: int) -> Address | None:
    """Host and port of the `sockaddr` that begins there; None if there is none."""
    family = int.from_bytes(data[offset : offset + 2], sys.byteorder)
    port = int.from_bytes(data[offset + 2 : offset + 4], "big")
    if family == socket.AF_INET and port and len(data) >= offset + 8:
        return _plain(data[offset + 4 : offset + 8]), port
    if family == socket.AF_INET6 and port and len(data) >= offset + 24:
        return _plain(data[offset + 8 : offset + 24]), port
    return None

"""Addresses of this host: those by which others reach it, and the interfaces that have them."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

__all__ = ["address_towards", "first_address", "interface_of", "is_loopback", "is_own", "name_problem"]

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IPV6 = Path("/proc/self/net/if_inet6")


def first_address(host: str) -> str | None:
    """What a name resolves to first on this host; None: it does not."""
    return next(iter(_addresses(host)), None)


def is_loopback(address: str) -> bool:
    """Whether other hosts cannot reach it since each has one of its own."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_towards(host: str) -> str | None:
    """The address of this host from which packets to `host` leave; nothing is sent. None: there is no way."""
    return next((source for each in _addresses(host) if (source := _source(each)) is not None), None)


def is_own(host: str) -> bool:
    """Whether a name or an address is this host's, and no loopback address."""
    return any(not is_loopback(each) and _source(each) == each for each in _addresses(host))


def interface_of(address: str) -> str | None:
    """Name of the interface that has the address; None: none has it as its first one."""
    given = ipaddress.ip_address(address.partition("%")[0])
    if given.version == 6:
        try:
            rows = [line.split() for line in _IPV6.read_text().splitlines()]
        except OSError:
            return None
        return next((row[-1] for row in rows if bytes.fromhex(row[0]) == given.packed), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if found[20:24] == given.packed:
                return name
    return None


def name_problem() -> str:
    """Why others cannot reach this host at what its own name resolves to, which gloo tells them; "" if they can."""
    name = socket.gethostname()
    found = _addresses(name)
    if not found:
        return f"the name of this host, {name!r}, does not resolve here"
    usable = next((each for each in found if is_loopback(each) or _source(each) == each), None)
    if usable is None:
        return f"the name of this host, {name!r}, is {found[0]} here, which is no address of this host"
    if is_loopback(usable):
        return f"the name of this host, {name!r}, is {usable} here, which no other host can reach"
    return ""


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(each[4][0]) for each in found]


def _source(address: str) -> str | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None

"""The address that a cache server listens on."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

__all__ = ["choose_address"]

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_LOOPBACK = "127.0.0.1"


def choose_address(interface: str | None, num_nodes: int) -> str:
    """Return the address to listen on.

    Args:
        interface: an address of this machine or the name of an interface. None: loopback if there is one node, else
            what GLOO_SOCKET_IFNAME says, else the address from which MASTER_ADDR is reached.
        num_nodes: of the job.

    Raises:
        ValueError: there is no such interface, or it is a wildcard, or no way to MASTER_ADDR.
    """
    if interface is None and num_nodes == 1:
        return _LOOPBACK
    chosen = interface or os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not chosen:
        return _towards(os.environ.get("MASTER_ADDR", ""))
    try:
        address = ipaddress.ip_address(chosen)
    except ValueError:
        return _of_interface(chosen)
    if address.is_unspecified:
        raise ValueError(f"interface: {chosen} means every interface; pass the name of one")
    return str(address)


def _of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            raise ValueError(f"interface: {name!r} has no IPv4 address here: {error}") from error
    return socket.inet_ntoa(answer[20:24])


def _towards(master: str) -> str:
    """The address that packets to `master` leave from; nothing is sent."""
    try:
        family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(
            f"interface: cannot find the interface that routes to MASTER_ADDR={master!r} ({error}); pass its name"
        ) from error

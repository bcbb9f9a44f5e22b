"""Linux kernel calls that Python's standard library lacks: namespaces, devices, links.

Source: namespaces(7), netdevice(7), rtnetlink(7), packet(7), and Documentation/networking/tuntap.rst of Linux.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

from bagua.lab.netlink import ACKNOWLEDGE, CREATE, EXCLUSIVE, REPLACE, attribute, request

__all__ = [
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "CLONE_NEWUSER",
    "CLONE_NEWUTS",
    "add_route",
    "add_to_bridge",
    "block_neighbour",
    "configure",
    "congestion_control",
    "make_bridge",
    "make_veth",
    "mount",
    "offload",
    "open_packet_port",
    "open_tap",
    "point_to_point",
    "remove",
    "set_congestion_control",
    "set_mac",
    "setns",
    "unshare",
    "up",
]

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER = 0x00020000, 0x04000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
# Generic ioctl numbers; the TUN ones hold on every architecture but MIPS, PowerPC, SPARC and Alpha.
_SIOCSIFFLAGS, _SIOCGIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8913, 0x8916, 0x891C
_SIOCSIFHWADDR, _SIOCETHTOOL, _SIOCBRADDBR, _SIOCBRADDIF = 0x8924, 0x8946, 0x89A0, 0x89A2
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_UP, _IFF_NOARP, _IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x80, 0x2, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6, _TUN_F_TSO_ECN = 1, 2, 4, 8
_ETHTOOL_STSO, _ETHTOOL_SGSO = 0x1F, 0x24
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_QDISC_BYPASS, _PACKET_IGNORE_OUTGOING = 263, 15, 20, 23
_ETH_P_ALL = 0x0003
_NOBODY = bytes((0x02, 0xBA, 0x67, 0x75, 0xFF, 0xFE))  # as hosts' addresses, of a port that no switch has
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def _call(name: str, *args: object) -> None:
    if getattr(_libc, name)(*args) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def unshare(flags: int) -> None:
    """Moves this process into new namespaces (a new pid namespace holds its next child)."""
    _call("unshare", flags)


def congestion_control() -> str:
    """How TCP connections of this network namespace adapt their rate, unless they say otherwise: "cubic", "bbr"."""
    return _CONGESTION.read_text().strip()


def set_congestion_control(name: str) -> None:
    """Sets that; sockets made from now on have it.

    Raises:
        OSError: the kernel has no such algorithm, or does not allow it here.
    """
    try:
        _CONGESTION.write_text(name)
    except FileNotFoundError as error:
        there = _CONGESTION.with_name("tcp_available_congestion_control").read_text().split()
        what = f"the kernel has no congestion control {name!r}, only {', '.join(there)}"
        raise OSError(what) from error
    except OSError as error:
        raise OSError(f"congestion control {name!r} cannot be set here: {error.strerror}") from error


def setns(path: str, kind: int) -> None:
    """Moves this process into the namespace at `path`, e.g. /proc/12/ns/net."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", fd, kind)
    finally:
        os.close(fd)


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    """mount(2)."""
    _call("mount", source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), None)


def _ioctl(request: int, payload: bytes) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return fcntl.ioctl(sock.fileno(), request, payload)


def up(name: str) -> None:
    """Switches a device on."""
    _add_flag(name, _IFF_UP)


def point_to_point(name: str) -> None:
    """Nobody is asked for hardware addresses: frames go to the device's own, which the other end has too."""
    _add_flag(name, _IFF_NOARP)


def _add_flag(name: str, flag: int) -> None:
    flags = struct.unpack("16sh", _ioctl(_SIOCGIFFLAGS, struct.pack("16sh14x", name.encode(), 0))[:18])[1]
    _ioctl(_SIOCSIFFLAGS, struct.pack("16sh14x", name.encode(), flags | flag))


def set_mac(name: str, mac: bytes) -> None:
    """Gives a device another hardware address."""
    _ioctl(_SIOCSIFHWADDR, struct.pack("16sH14s", name.encode(), 1, mac))


def configure(name: str, mac: bytes, address: str, netmask: str) -> None:
    """Gives a device its addresses and switches it on. Without IPv6: its neighbour discovery would be traffic."""
    set_mac(name, mac)
    for path in (f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6",):
        if os.access(path, os.W_OK):
            Path(path).write_text("1")
    for number, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, netmask)):
        sockaddr = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
        _ioctl(number, struct.pack("16s16s", name.encode(), sockaddr))
    up(name)


def offload(name: str, enabled: bool) -> None:
    """Switches TSO and GSO of a device: off, it sends single packets instead of frames of up to 64 KB."""
    for command in (_ETHTOOL_STSO, _ETHTOOL_SGSO):
        value = ctypes.create_string_buffer(struct.pack("II", command, int(enabled)))
        _ioctl(_SIOCETHTOOL, struct.pack("16sP16x", name.encode(), ctypes.addressof(value)))


def open_tap(name: str) -> int:
    """Makes a TAP device in this process's network namespace; it lives as long as the descriptor.

    Raises:
        OSError: if /dev/net/tun cannot be opened, or the kernel has no TAP devices.
    """
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
        fcntl.ioctl(fd, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6 | _TUN_F_TSO_ECN)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_packet_port(name: str) -> int:
    """A raw socket on a device, whose frames come and go behind a virtio_net_hdr, as on a TAP descriptor."""
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sock.setblocking(False)
    sock.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    sock.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    sock.setsockopt(_SOL_PACKET, _PACKET_QDISC_BYPASS, 1)
    for option, forced in ((socket.SO_RCVBUF, 33), (socket.SO_SNDBUF, 32)):
        try:
            sock.setsockopt(socket.SOL_SOCKET, forced, 64 << 20)  # SO_RCVBUFFORCE: above the limit, for root only
        except OSError:
            sock.setsockopt(socket.SOL_SOCKET, option, 64 << 20)
    sock.bind((name, _ETH_P_ALL))
    return sock.detach()


def make_bridge(name: str) -> None:
    """Makes a bridge and switches it on."""
    _ioctl(_SIOCBRADDBR, name.encode().ljust(16, b"\0"))
    up(name)


def add_to_bridge(bridge: str, port: str) -> None:
    """Plugs a device into a bridge."""
    _ioctl(_SIOCBRADDIF, struct.pack("16si20x", bridge.encode(), socket.if_nametoindex(port)))


def remove(name: str) -> None:
    """Removes a device, if there is one of that name; of a veth pair both."""
    try:
        index = socket.if_nametoindex(name)
    except OSError:
        return
    request(17, ACKNOWLEDGE, struct.pack("BxHiII", 0, 0, index, 0, 0), f"removing {name}")  # RTM_DELLINK


def add_route(address: str, device: str) -> None:
    """Frames to this address leave through that device."""
    table, boot, link, unicast, new_route, destination, out = 254, 3, 253, 1, 24, 1, 4
    body = struct.pack("BBBBBBBBI", socket.AF_INET, 32, 0, 0, table, boot, link, unicast, 0)
    body += attribute(destination, socket.inet_aton(address))
    body += attribute(out, struct.pack("I", socket.if_nametoindex(device)))
    request(new_route, ACKNOWLEDGE | CREATE | REPLACE, body, f"route to {address}")


def block_neighbour(address: str, device: str, blocked: bool) -> None:
    """Frames to this address leave `device` for a hardware address that nobody has, so they are lost silently."""
    new, delete, permanent, destination, hardware = 28, 29, 0x80, 1, 2  # RTM_NEWNEIGH, RTM_DELNEIGH, NUD_, NDA_
    body = struct.pack("BxHiHBB", socket.AF_INET, 0, socket.if_nametoindex(device), permanent, 0, 0)
    body += attribute(destination, socket.inet_aton(address))
    if blocked:
        body += attribute(hardware, _NOBODY)
        request(new, ACKNOWLEDGE | CREATE | REPLACE, body, f"blocking {address}")
        return
    try:
        request(delete, ACKNOWLEDGE, body, f"unblocking {address}")
    except FileNotFoundError:
        return  # it was not blocked


def make_veth(here: str, there: str, pid: int) -> None:
    """Makes a pair of joined devices: `here` in this network namespace, `there` in that of process `pid`.

    Raises:
        OSError: the kernel's answer, e.g. that it has no veth.
    """
    kind, info, data, peer = 1, 18, 2, 1  # IFLA_INFO_KIND, IFLA_LINKINFO, IFLA_INFO_DATA, VETH_INFO_PEER
    ifname, net_ns_pid = 3, 19
    no_link = struct.pack("BxHiII", 0, 0, 0, 0, 0)
    other = no_link + attribute(ifname, there.encode() + b"\0") + attribute(net_ns_pid, struct.pack("I", pid))
    veth = attribute(kind, b"veth\0") + attribute(data, attribute(peer, other))
    body = no_link + attribute(ifname, here.encode() + b"\0") + attribute(info, veth)
    new_link = 16
    request(new_link, ACKNOWLEDGE | CREATE | EXCLUSIVE, body, f"veth {here}")

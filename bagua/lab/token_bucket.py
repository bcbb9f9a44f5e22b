"""The kernel's token bucket on a device: a bandwidth for what leaves it, with a queue of so many bytes.

Source: tc-tbf(8) and include/uapi/linux/pkt_sched.h of Linux.
"""

from __future__ import annotations

import socket
import struct

from bagua.lab import netlink

__all__ = ["ENDLESS_BYTES", "drops", "limit", "limit_beside_relay"]

ENDLESS_BYTES = 1 << 30  # a queue that holds whatever the sockets let out
_FRAME_BYTES = 72_000  # a frame of 64 KB with headers for each of its packets: a smaller bucket would split it
_SLACK_S = 0.001
_FREE_BPS, _FREE_BURST = 10**12, 1 << 28  # no limit: removing the bucket would drop what waits in it
_NEW_QDISC, _GET_QDISC = 36, 38
_ROOT = 0xFFFFFFFF
_KIND, _OPTIONS, _STATS2 = 1, 2, 7
_PARMS, _RATE64, _BURST = 1, 4, 6
_STATS_QUEUE = 3
_ETHERNET = 1
_BESIDE_RELAY = 1.02
_BESIDE_RELAY_SLACK_S = 0.005  # its real-time priority keeps the kernel waiting


def limit(device: str, bits_per_s: int, queue_bytes: int, slack_s: float = _SLACK_S) -> None:
    """Gives a device this bandwidth, or another one; frames that wait stay.

    A frame counts with the headers of all packets into which a network card would cut it, as in the relay.

    Args:
        device: in this network namespace.
        bits_per_s: 0 for no limit.
        queue_bytes: what may wait; what comes then is dropped.
        slack_s: how late the kernel may come to the bucket without loss of bandwidth.

    Raises:
        OSError: if the kernel has no token buckets, or does not allow it.
    """
    bytes_per_s = (bits_per_s or _FREE_BPS) // 8
    burst = _FRAME_BYTES + round(slack_s * bytes_per_s) if bits_per_s else _FREE_BURST
    rate = struct.pack("BBHhHI", 0, _ETHERNET, 0, 0, 0, min(bytes_per_s, 0xFFFFFFFF))
    parms = rate + bytes(12) + struct.pack("III", queue_bytes, 0, 0)
    options = netlink.attribute(_PARMS, parms) + netlink.attribute(_BURST, struct.pack("I", burst))
    if bytes_per_s > 0xFFFFFFFF:
        options += netlink.attribute(_RATE64, struct.pack("Q", bytes_per_s))
    body = _tcmsg(device) + netlink.attribute(_KIND, b"tbf\0") + netlink.attribute(_OPTIONS, options)
    flags = netlink.ACKNOWLEDGE | netlink.CREATE | netlink.REPLACE
    netlink.request(_NEW_QDISC, flags, body, f"token bucket on {device}")


def limit_beside_relay(device: str, bits_per_s: int) -> None:
    """Has a host hold back what a relay would have to: a little more than the link, so that the relay's clock decides.

    The arguments and errors are those of `limit`.
    """
    limit(device, round(_BESIDE_RELAY * bits_per_s), ENDLESS_BYTES, _BESIDE_RELAY_SLACK_S)


def drops(device: str) -> int:
    """Frames that found the queue full, since the first `limit`."""
    index = socket.if_nametoindex(device)
    for body in netlink.request(_GET_QDISC, netlink.DUMP, _tcmsg(device), f"statistics of {device}"):
        if struct.unpack_from("i", body, 4)[0] != index:
            continue
        for kind, payload in netlink.attributes(body[20:]):
            if kind == _STATS2:
                for inner, numbers in netlink.attributes(payload):
                    if inner == _STATS_QUEUE:
                        return int(struct.unpack_from("I", numbers, 8)[0])
    return 0


def _tcmsg(device: str) -> bytes:
    return struct.pack("BxHiIII", 0, 0, socket.if_nametoindex(device), 0, _ROOT, 0)

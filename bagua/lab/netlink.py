"""Requests to the kernel's network configuration: messages of rtnetlink and their attributes.

Source: rtnetlink(7), netlink(7).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

__all__ = ["ACKNOWLEDGE", "CREATE", "DUMP", "EXCLUSIVE", "REPLACE", "attribute", "attributes", "request"]

ACKNOWLEDGE, DUMP, REPLACE, EXCLUSIVE, CREATE = 0x4, 0x300, 0x100, 0x200, 0x400
_REQUEST, _ERROR, _DONE = 0x1, 2, 3


def request(kind: int, flags: int, body: bytes, what: str) -> list[bytes]:
    """Sends one request and reads the answer.

    Args:
        kind: of the message, RTM_...
        flags: ACKNOWLEDGE, or DUMP to ask for all there is, and the rest.
        body: the message without its header.
        what: names the request in errors.

    Returns:
        bodies of the messages that DUMP asked for.

    Raises:
        OSError: the kernel's answer.
    """
    header = struct.pack("IHHII", 16 + len(body), kind, _REQUEST | flags, 1, 0)
    found: list[bytes] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        sock.send(header + body)
        while True:
            data = sock.recv(1 << 20)
            while len(data) >= 16:
                length, answer = struct.unpack_from("IH", data)
                if answer == _ERROR:
                    error = -struct.unpack_from("i", data, 16)[0]
                    if error:
                        raise OSError(error, f"{what}: {os.strerror(error)}")
                    return found
                if answer == _DONE:
                    return found
                found.append(data[16:length])
                data = data[length + -length % 4 :]


def attribute(kind: int, payload: bytes) -> bytes:
    """One attribute; several in a row are the payload of one that nests them."""
    length = 4 + len(payload)
    return struct.pack("HH", length, kind) + payload + b"\0" * (-length % 4)


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and payload of each attribute in a row of them."""
    while len(data) >= 4:
        length, kind = struct.unpack_from("HH", data)
        if not 4 <= length <= len(data):
            return
        yield kind & 0x3FFF, data[4:length]
        data = data[length + -length % 4 :]

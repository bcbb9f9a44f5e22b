"""A peer that lies: speaks the plugin's wire format by hand."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from bagua.net.driver import Process

MAGIC, VERSION = 0x4E416742, 1


@dataclass
class Handle:
    """A listener's handle, as it comes through NCCL."""

    magic: int
    version: int
    num_flows: int
    secret: bytes
    port: int

    @classmethod
    def read(cls, line: str) -> Handle:
        raw = bytes.fromhex(line.strip())
        magic, version, num_flows, secret, family, port = struct.unpack_from("<IHH16sH2s", raw)
        assert family == socket.AF_INET
        return cls(magic, version, num_flows, secret, int.from_bytes(port, "big"))


def greeting(handle: Handle, flow: int = 0, session: int = 7, **wrong: int) -> bytes:
    """What a sender says first on each flow."""
    fields = {"magic": handle.magic, "version": handle.version, "flows": handle.num_flows, **wrong}
    secret = os.urandom(16) if "secret" in wrong else handle.secret
    return struct.pack(
        "<IHHHHHH16sQ", fields["magic"], fields["version"], flow, fields["flows"], 0, 0, 0, secret, session
    )


def header(sequence: int, offset: int, length: int, total: int) -> bytes:
    """What comes before a slice."""
    return struct.pack("<IIII", sequence, offset, length, total)


def call(handle: Handle) -> socket.socket:
    """A connection to the listener."""
    return socket.create_connection(("127.0.0.1", handle.port), timeout=60)


def receiver(num_flows: int = 1, **options: object) -> tuple[Process, Handle, str]:
    """A driver that waits for messages of up to 64 KiB; its handle, and that as the line it printed."""
    process = Process(
        env={"NCCL_SOCKET_IFNAME": "lo", "BAGUA_NET_FLOWS": str(num_flows)},
        **{"mode": "rate", "role": "recv", "bytes": 65536, "timeout_seconds": 20, **options},
    )
    (line,) = process.read_handles(1)
    return process, Handle.read(line), line

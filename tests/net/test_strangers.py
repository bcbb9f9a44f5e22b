"""Whoever else calls the listening port, and peers that send nonsense."""

from __future__ import annotations

import socket
import struct

import pytest

from bagua.net.driver import Process
from tests.net.peer import Handle, call, greeting, header, receiver


def driver_sender(line: str, seconds: float = 0.1) -> Process:
    env = {"NCCL_SOCKET_IFNAME": "lo", "BAGUA_NET_FLOWS": "3"}  # the listener's number counts
    process = Process(env=env, mode="rate", role="send", bytes=65536, seconds=seconds)
    process.give_handles([line])
    return process


def test_strangers_are_ignored() -> None:
    process, handle, line = receiver(num_flows=4)
    strangers: list[socket.socket] = []
    for said in (
        b"",  # half open: connects and says nothing
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
        b"\0" * 1000,
        greeting(handle)[:17],
        greeting(handle, secret=0),
        greeting(handle, magic=1),
        greeting(handle, version=9),
        greeting(handle, flows=2),
        greeting(handle, flow=4),
        greeting(handle, flow=2, session=1234),  # a session that never becomes complete
    ):
        strangers.append(call(handle))
        strangers[-1].sendall(said)
    closed = call(handle)
    closed.close()
    sender = driver_sender(line)
    for each in (sender, process):
        each.read_result(20)
    sender.release()
    process.release()
    ended = [each.wait(60) for each in (sender, process)]
    assert [each.status for each in ended] == [0, 0], [each.errors for each in ended]
    assert sum(ended[1].results[-1]["bins"]) > 0
    assert "speaks version 9 with 4 flows, not version 1 with 4" in ended[1].errors
    for stranger in strangers:
        stranger.close()


NONSENSE = {
    "a slice leaves its message": header(0, 4096, 100, 4100),
    "begins at an odd place": header(0, 100, 100, 1000),
    "empty slice": header(0, 0, 0, 10),
    "larger than the buffer": header(0, 0, 65537, 65537),
    "larger than the buffer, at the end of 32 bits": header(0, 2**32 - 4096, 4095, 2**32 - 1),
    "message that is complete": header(0, 0, 5, 5) + b"hello" + header(0, 0, 5, 5),
    "disagree on its size": header(0, 0, 4096, 8192) + bytes(4096) + header(0, 4096, 4, 4100),
    "more slices than bytes": header(0, 0, 4096, 8192) + bytes(4096) + header(0, 0, 8192, 8192),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_an_error(what: str) -> None:
    process, handle, _ = receiver(warmup_seconds=30)
    with call(handle) as connection:
        connection.sendall(greeting(handle) + NONSENSE[what])
        ended = process.wait(60)
    assert ended.status == 3 and ended.results[-1]["result"] == 6, ended
    assert what.split(",")[0] in ended.errors


@pytest.mark.parametrize("said", [header(0, 0, 4096, 8192) + bytes(100), header(0, 0, 5, 5)[:7], b""])
def test_a_sender_that_ends_early_is_an_error(said: bytes) -> None:
    process, handle, _ = receiver(warmup_seconds=30)
    with call(handle) as connection:
        connection.sendall(greeting(handle) + said)
    ended = process.wait(60)
    assert ended.status == 3 and ended.results[-1]["result"] == 6, ended
    assert "closed by the peer" in ended.errors


def test_a_slice_far_ahead_waits() -> None:
    """A message that is not expected yet is no error: the receive may be late. It is held back in the socket."""
    process, handle, _ = receiver(warmup_seconds=0, seconds=0.1)
    with call(handle) as connection:
        connection.sendall(greeting(handle) + header(0, 0, 5, 5) + b"first")
        for sequence in range(1, 200):
            connection.sendall(header(sequence, 0, 4, 4) + struct.pack("<I", sequence))
        connection.sendall(header(200, 0, 0, 0))
        process.read_result(10)
        process.release()
        ended = process.wait(60)
    assert ended.status == 0, (ended.results, ended.errors)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: b"\0" * len(raw), "does not use Bagua-Net"),
        (lambda raw: raw[:4] + b"\x09\0" + raw[6:], "another version"),
        (lambda raw: raw[:6] + b"\xff\xff" + raw[8:], "impossible number of flows"),
        (lambda raw: raw[:24] + b"\xff\0" + raw[26:], "unknown address family"),
    ],
)
def test_a_handle_of_another_plugin(damage, message: str) -> None:
    process, _, line = receiver()
    raw = damage(bytes.fromhex(line.strip()))
    sender = driver_sender(raw.hex() + "\n")
    ended = sender.wait(60)
    process.kill()
    process.wait(60)
    assert ended.status == 3 and ended.results[-1] == {"error": "connect", "result": 6}
    assert message in ended.errors


def test_the_format_here_is_the_plugins() -> None:
    process, handle, _ = receiver(num_flows=5)
    process.kill()
    process.wait(60)
    assert handle == Handle(0x4E416742, 1, 5, handle.secret, handle.port)
    assert len(set(handle.secret)) > 4 and handle.port > 0

"""Answers of a server are read whole, however they are cut, and nothing else is taken for one."""

from __future__ import annotations

import random
import socket
import threading

import pytest

from bagua.data.cache.redis_reply import read_values


def answer(*values: bytes | None) -> bytes:
    parts = [b"$-1\r\n" if v is None else b"$%d\r\n%s\r\n" % (len(v), v) for v in values]
    return b"*%d\r\n" % len(values) + b"".join(parts)


def read(message: bytes, count: int, rng: random.Random | None = None) -> list[bytearray | None]:
    """Send in pieces of any size and close."""
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs:
            at = 0
            while at < len(message):
                size = rng.choice([1, 2, 3, 200, 300, 5000]) if rng else len(message)
                theirs.sendall(message[at : at + size])
                at += size

    thread = threading.Thread(target=send)
    thread.start()
    try:
        ours.settimeout(10)
        return read_values(ours, count, KeyError)
    finally:
        ours.close()
        thread.join(60)


def test_values_however_they_are_cut() -> None:
    rng = random.Random(0)
    for _ in range(40):
        sizes = [rng.choice([0, 1, 2, 250, 255, 256, 257, 4000]) for _ in range(6)]
        values = [None if rng.random() < 0.2 else rng.randbytes(size) + b"\r\n$1" for size in sizes]
        assert read(answer(*values), 6, rng) == values


@pytest.mark.parametrize(
    "message",
    [
        b"", b"*1\r\n", b"*2\r\n$1\r\na\r\n", b"*1\r\n$5\r\nab", b"*1\r\n$1\r\nabc\r\n", b"*1\r\n$-2\r\n",
        b"*1\r\n$99999999999\r\n", b"*1\r\n:1\r\n", b"*1\r\n$x\r\n", b"+OK\r\n", b"x" * 70_000,
    ],
    ids=lambda message: str(message[:20]),
)  # fmt: skip
def test_anything_else_is_a_connection_error(message: bytes) -> None:
    with pytest.raises(ConnectionError):
        read(message, 1)


def test_an_error_of_the_server_is_told() -> None:
    with pytest.raises(KeyError, match="LOADING"):
        read(b"-LOADING the dataset\r\n", 1)

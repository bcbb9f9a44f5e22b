"""Frames of status: length, then JSON. Between hosts both ends prove that they know the job's token first."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

__all__ = ["MAX_STATUS", "StatusError", "answer", "ask", "receive", "send"]

MAX_STATUS = 1 << 20
_MAX_HELLO = 512
_LENGTH = struct.Struct(">I")
_MAC = hashlib.sha256().digest_size
_VERSION = "bagua-status-1"


class StatusError(Exception):
    """The other end said something that is no status, or does not know the token."""


def send(sock: socket.socket, value: Any) -> None:
    """Send `value` as one frame.

    Raises:
        OSError: the connection has failed, or the other end did not read within the socket's timeout.
    """
    _send(sock, json.dumps(value, separators=(",", ":")).encode())


def receive(sock: socket.socket, deadline: float) -> Any:
    """The value of the next frame.

    Args:
        deadline: on the clock `time.monotonic`.

    Raises:
        StatusError: the frame is too long, or no JSON.
        OSError: the connection has failed or ended; TimeoutError: the frame was not complete by the deadline.
    """
    return _parse(_receive(sock, deadline, MAX_STATUS))


def answer(sock: socket.socket, describe: Callable[[], Any], token: bytes, deadline: float) -> None:
    """Send what `describe` returns to a peer that knows `token`; for another one it is not called.

    Raises:
        StatusError: the peer does not know it.
        OSError: as in `receive`.
    """
    mine = secrets.token_hex(16)
    send(sock, [_VERSION, mine])
    hello = _parse(_receive(sock, deadline, _MAX_HELLO))
    if type(hello) is not list or len(hello) != 2 or not all(type(each) is str for each in hello):
        raise StatusError("not a question for the status")
    theirs, proof = hello
    if not hmac.compare_digest(_mac(token, "ask", mine, theirs).hex().encode(), proof.encode(errors="replace")):
        raise StatusError("the peer does not know the job's token")
    data = json.dumps(describe(), separators=(",", ":")).encode()
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    _send(sock, _mac(token, "answer", mine, theirs, data) + data)


def ask(sock: socket.socket, token: bytes, deadline: float) -> Any:
    """The value that `answer` sends at the other end.

    Raises:
        StatusError: the other end closes the connection after the question, as for a wrong token, or does not know
            the token itself.
        OSError: as in `receive`.
    """
    hello = _parse(_receive(sock, deadline, _MAX_HELLO))
    if type(hello) is not list or len(hello) != 2 or hello[0] != _VERSION or type(hello[1]) is not str:
        raise StatusError("it serves no status of a job, or one of another version of bagua")
    theirs, mine = hello[1], secrets.token_hex(16)
    send(sock, [mine, _mac(token, "ask", theirs, mine).hex()])
    try:
        frame = _receive(sock, deadline, MAX_STATUS + _MAC)
    except ConnectionError:
        raise StatusError("it does not accept the token") from None
    proof, data = frame[:_MAC], frame[_MAC:]
    if not hmac.compare_digest(_mac(token, "answer", theirs, mine, data), proof):
        raise StatusError("it does not know the token")
    return _parse(data)


def _mac(token: bytes, *parts: str | bytes) -> bytes:
    encoded = [part if isinstance(part, bytes) else part.encode(errors="replace") for part in (_VERSION, *parts)]
    text = b"".join(_LENGTH.pack(len(part)) + part for part in encoded)  # unambiguous, whatever a peer sends
    return hmac.new(token, text, hashlib.sha256).digest()


def _send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket, deadline: float, limit: int) -> bytes:
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size, deadline))
    if length > limit:
        raise StatusError(f"a frame of {length} bytes, at most {limit} are allowed")
    return _read(sock, length, deadline)


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        sock.settimeout(left_s)
        more = sock.recv(min(size - len(data), 1 << 16))
        if not more:
            raise ConnectionResetError("the connection was closed")
        data += more
    return bytes(data)


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise StatusError("not JSON") from None

"""Values of a Redis server straight into memory of their own: several times as fast as by way of redis-py's buffers.

hiredis is as fast for large values and faster for small ones, but returns `bytes`. Tensors read from the cache are
views of the value, which must be writable; with the copy that this takes, large values need about twice the time.
"""

from __future__ import annotations

from typing import Any

__all__ = ["read_values"]

_BUFFER_BYTES = 1 << 16
_LOOK_AHEAD_BYTES = 256  # little enough that most of a value goes where it belongs
_MAX_VALUE_BYTES = 1 << 29  # Redis's own limit


def read_values(sock: Any, count: int, error: type[Exception]) -> list[bytearray | None]:
    """Return the answer to an MGET of `count` keys, read from a connected socket that has no other answers pending.

    Source: RESP2, redis.io/docs/latest/develop/reference/protocol-spec.

    Raises:
        error: the server answered with an error; the connection can be used again.
        ConnectionError, OSError: the connection ended, or what came is no such answer; it must be closed.
    """
    reader = _Reader(sock)
    head = reader.line()
    if head[:1] == b"-":
        raise error(head[1:].decode(errors="replace"))
    if head != b"*%d" % count:
        raise ConnectionError(f"expected {count} values, got {head[:40]!r}")
    return [reader.value() for _ in range(count)]


class _Reader:
    """Lines through a small buffer, values past it."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0

    def line(self) -> bytes:
        """Return up to the next line break, without it."""
        while True:
            at = self._buffer.find(b"\r\n", self._begin, self._end)
            if at >= 0:
                text = bytes(self._view[self._begin : at])
                self._begin = at + 2
                return text
            self._fill()

    def value(self) -> bytearray | None:
        """Return the next value, None if there is none."""
        head = self.line()
        if head == b"$-1":
            return None
        if head[:1] != b"$" or not head[1:].isdigit() or int(head[1:]) > _MAX_VALUE_BYTES:
            raise ConnectionError(f"expected a value, got {head[:40]!r}")
        value = bytearray(int(head[1:]))
        into = memoryview(value)
        got = min(len(value), self._end - self._begin)
        into[:got] = self._view[self._begin : self._begin + got]
        self._begin += got
        while got < len(value):
            got += self._receive(into[got:])
        if self.line():
            raise ConnectionError("a value is longer than announced")
        return value

    def _fill(self) -> None:
        left = self._end - self._begin
        if left > _BUFFER_BYTES - _LOOK_AHEAD_BYTES:
            raise ConnectionError("a line does not end")
        self._buffer[:left] = self._buffer[self._begin : self._end]
        self._begin, self._end = 0, left
        self._end += self._receive(self._view[left : left + _LOOK_AHEAD_BYTES])

    def _receive(self, into: memoryview) -> int:
        count = self._sock.recv_into(into)
        if count == 0:
            raise ConnectionError("the server closed the connection")
        return count

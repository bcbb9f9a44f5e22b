"""Frames on a TCP connection: length, HMAC-SHA256 under the job's token, message."""

from __future__ import annotations

import hashlib
import hmac
import struct

from bagua.membership.messages import MAX_FRAME, MessageError

__all__ = ["FrameReader", "pack"]

_LENGTH = struct.Struct(">I")
_TAG = hashlib.sha256().digest_size


def pack(message: bytes, token: bytes) -> bytes:
    """The frame of a message."""
    return _LENGTH.pack(len(message)) + hmac.digest(token, message, "sha256") + message


class FrameReader:
    """Takes frames out of the bytes of one connection. Holds at most one frame and what was read with it.

    Args:
        token: frames made with another one are refused.

    Example:
        >>> reader = FrameReader(b"secret")
        >>> frame = pack(b"hello", b"secret")
        >>> reader.feed(frame[:10]), reader.feed(frame[10:])
        ([], [b'hello'])
    """

    def __init__(self, token: bytes) -> None:
        self._token, self._buffer = token, bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete now.

        Raises:
            MessageError: a frame is too long or was not made with the token. Nothing of it was interpreted.
        """
        self._buffer += data
        found: list[bytes] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise MessageError(f"a frame of {length} bytes, at most {MAX_FRAME} are allowed")
            end = _LENGTH.size + _TAG + length
            if len(self._buffer) < end:
                break
            tag = bytes(self._buffer[_LENGTH.size : _LENGTH.size + _TAG])
            message = bytes(self._buffer[_LENGTH.size + _TAG : end])
            if not hmac.compare_digest(tag, hmac.digest(self._token, message, "sha256")):
                raise MessageError("a frame that was not made with the token of this job")
            del self._buffer[:end]
            found.append(message)
        return found

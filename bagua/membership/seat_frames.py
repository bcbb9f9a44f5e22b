"""Frames between a rank and its launcher, on a UNIX socket: length, then a JSON list. Never pickle."""

from __future__ import annotations

import json
import struct
from dataclasses import fields
from typing import Any

from bagua.membership.messages import MAX_MEMBERS, MAX_SEATS, MessageError
from bagua.membership.seat import View

__all__ = ["MAX_SEAT_FRAME", "SEAT_VERSION", "SeatFrames", "number", "pack", "view_from_wire", "view_to_wire"]

SEAT_VERSION = 3
MAX_SEAT_FRAME = 1 << 20  # a view lists up to 32 ranks of 256 hosts
_LENGTH = struct.Struct(">I")
_BIG = 2**62
_MAX_NAMES = MAX_MEMBERS * MAX_SEATS


def pack(message: list[Any]) -> bytes:
    """The frame of a message."""
    data = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(data)) + data


class SeatFrames:
    """Takes messages out of the bytes of one connection.

    Example:
        >>> frames, frame = SeatFrames(), pack([1, "start_step", 4, 17])
        >>> frames.feed(frame[:5]), frames.feed(frame[5:])
        ([], [[1, 'start_step', 4, 17]])
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        """The messages that are complete now.

        Raises:
            MessageError: a frame is too long or is no JSON list.
        """
        self._buffer += data
        found: list[list[Any]] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_SEAT_FRAME:
                raise MessageError(f"a frame of {length} bytes, at most {MAX_SEAT_FRAME} are allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                message = json.loads(self._buffer[_LENGTH.size : end])
            except (ValueError, RecursionError) as error:
                raise MessageError(f"not JSON: {error}") from None
            if type(message) is not list or not message:
                raise MessageError(f"expected a list, got {message!r:.80}")
            del self._buffer[:end]
            found.append(message)
        return found


def number(value: Any) -> int:
    """`value` if it is a number that a step or an epoch can have.

    Raises:
        MessageError: it is not.
    """
    if type(value) is not int or not 0 <= value <= _BIG:
        raise MessageError(f"expected a number from 0 to {_BIG}, got {value!r:.80}")
    return value


def _names(value: Any) -> tuple[str, ...]:
    if type(value) is not list or len(value) > _MAX_NAMES:
        raise MessageError(f"expected a list of at most {_MAX_NAMES} names, got {value!r:.80}")
    return tuple(_text(item) for item in value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise MessageError(f"expected text, got {value!r:.80}")
    return value


def _optional(value: Any) -> int | None:
    return None if value is None else number(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise MessageError(f"expected true or false, got {value!r:.80}")
    return value


_READERS = {"bool": _flag, "int": number, "int | None": _optional, "str": _text, "tuple[str, ...]": _names}
_FIELDS = {field.name: _READERS[str(field.type)] for field in fields(View)}


def view_to_wire(view: View | None) -> list[Any] | None:
    """A view as lists, text and numbers."""
    return None if view is None else [getattr(view, name) for name in _FIELDS]


def view_from_wire(value: Any) -> View | None:
    """The view that `view_to_wire` wrote, after JSON.

    Raises:
        MessageError: it is none.
    """
    if value is None:
        return None
    if type(value) is not list or len(value) != len(_FIELDS):
        raise MessageError(f"expected a view, got {value!r:.80}")
    view = View(**{name: read(item) for (name, read), item in zip(_FIELDS.items(), value, strict=True)})
    if view.rank is not None and view.rank >= len(view.members):
        raise MessageError(f"expected a rank below {len(view.members)}, got {view.rank}")
    return view

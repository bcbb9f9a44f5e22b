"""Messages as bytes: JSON lists of bounded length, checked field by field. Never pickle.

A frame is `[version, job, sender, incarnation, address, receiver, kind, field, ...]`. Everything in it has a limit, so
a frame has one (`MAX_FRAME` bytes). What does not fit the limits is refused when it is read, as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from typing import Any, TypeVar

from bagua.membership.epoch import NO_MODEL, Ballot, Epoch, Member
from bagua.membership.messages import (
    MAX_ADDRESS,
    MAX_FRAME,
    MAX_MEMBERS,
    MAX_NAME,
    MAX_PAYLOAD,
    MAX_SEAT,
    MAX_SEATS,
    Accept,
    Accepted,
    Decided,
    Envelope,
    Heartbeat,
    Join,
    MessageError,
    Prepare,
    Promise,
    Rejected,
    Report,
    Request,
    Rest,
    Resting,
)

__all__ = ["checked_argument", "checked_text", "decode", "encode", "epoch_from_wire", "epoch_to_wire"]

VERSION = 4
_BIG = 2**62
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Field:
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def checked_text(value: Any, limit: int) -> str:
    """`value` if it is printable ASCII of at most `limit` characters.

    Raises:
        MessageError: it is not.
    """
    if type(value) is not str or len(value) > limit or not (value.isascii() and (value.isprintable() or not value)):
        raise MessageError(f"expected printable ASCII of at most {limit} characters, got {value!r:.80}")
    return value


def checked_argument(what: str, value: str, limit: int) -> str:
    """`value` if it fits and is not empty.

    Raises:
        ValueError: it does not; names the argument `what`.
    """
    try:
        if checked_text(value, limit):
            return value
    except MessageError as error:
        raise ValueError(f"{what}: {error}") from None
    raise ValueError(f"{what}: must not be empty")


def _integer(low: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if type(value) is not int or not low <= value <= _BIG:
            raise MessageError(f"expected a number from {low} to {_BIG}, got {value!r:.80}")
        return value

    return read


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise MessageError(f"expected true or false, got {value!r:.80}")
    return value


def _items(value: Any, read: Callable[[Any], _T]) -> tuple[_T, ...]:
    if type(value) is not list or len(value) > MAX_MEMBERS:
        raise MessageError(f"expected a list of at most {MAX_MEMBERS}, got {value!r:.80}")
    return tuple(read(item) for item in value)


def _same(value: Any) -> Any:
    return value


_number, _held = _integer(0), _integer(NO_MODEL)


def _row(value: Any, *readers: Callable[[Any], Any]) -> list[Any]:
    if type(value) is not list or len(value) != len(readers):
        raise MessageError(f"expected a list of {len(readers)}, got {value!r:.80}")
    return [read(item) for read, item in zip(readers, value, strict=True)]


def _name(value: Any) -> str:
    if not checked_text(value, MAX_NAME):
        raise MessageError("a name is empty")
    return value


def _text(limit: int) -> Callable[[Any], str]:
    return lambda value: checked_text(value, limit)


def _ballot(value: Any) -> Ballot:
    return Ballot(*_row(value, _number, _name))


def _seats(value: Any) -> tuple[int, ...]:
    found = _items(value, _number)
    if len(found) > MAX_SEATS or any(each > MAX_SEAT for each in found) or sorted(set(found)) != list(found):
        raise MessageError(f"expected at most {MAX_SEATS} ascending numbers up to {MAX_SEAT}, got {value!r:.80}")
    return found


_MEMBER = (_name, _number, _text(MAX_ADDRESS), _text(MAX_PAYLOAD), _held, _flag, _seats)
_EPOCH = (_number, _number, _number, _number, _same, _flag, _text(MAX_PAYLOAD))
_REPORT = (_held, _text(MAX_PAYLOAD), _flag, _flag, lambda value: _items(value, _number), _seats)


def epoch_to_wire(epoch: Epoch) -> list[Any]:
    """An epoch as lists, text and numbers."""
    members = [[m.name, m.incarnation, m.address, m.payload, m.held, m.votes, list(m.seats)] for m in epoch.members]
    return [epoch.number, epoch.step, epoch.group, epoch.group_step, members, epoch.tie_break, epoch.reason]


def epoch_from_wire(value: Any) -> Epoch:
    """The epoch that `epoch_to_wire` wrote.

    Raises:
        MessageError: it is none, or contradicts itself.
    """
    number, step, group, group_step, members, tie_break, reason = _row(value, *_EPOCH)
    listed = _items(members, lambda item: Member(*_row(item, *_MEMBER)))
    if len({m.name for m in listed}) != len(listed):
        raise MessageError("an epoch lists a member twice")
    if not any(m.votes for m in listed) or any(m.votes and not m.trains for m in listed):
        raise MessageError("an epoch without voters, or with a voter that has no weights")
    if any(m.trains != bool(m.seats) for m in listed):
        raise MessageError("an epoch with a host that trains without ranks, or has ranks without weights")
    if max(m.held for m in listed) != step or group > number or group_step > step:
        raise MessageError("an epoch whose steps do not fit its members")
    return Epoch(number, step, group, group_step, listed, tie_break, reason)


def _optional(field: _Field) -> _Field:
    return _Field(
        lambda value: None if value is None else field.write(value),
        lambda value: None if value is None else field.read(value),
    )


_NUMBER = _Field(_same, _number)
_FLAG = _Field(_same, _flag)
_TEXT = _Field(_same, _text(MAX_PAYLOAD))
_BALLOT = _Field(list, _ballot)
_VALUE = _Field(epoch_to_wire, epoch_from_wire)
_REPORTED = _Field(
    lambda r: [*astuple(r)[:4], list(r.unheard), list(r.seats)], lambda value: Report(*_row(value, *_REPORT))
)

_KINDS: dict[type[Any], tuple[str, tuple[_Field, ...]]] = {
    Heartbeat: ("heartbeat", (_NUMBER, _NUMBER, _FLAG)),
    Join: ("join", (_NUMBER, _TEXT)),
    Request: ("request", (_NUMBER, _TEXT, _FLAG)),
    Rest: ("rest", (_NUMBER, _NUMBER)),
    Resting: ("resting", (_NUMBER,)),
    Prepare: ("prepare", (_NUMBER, _BALLOT)),
    Promise: ("promise", (_NUMBER, _BALLOT, _REPORTED, _optional(_BALLOT), _optional(_VALUE))),
    Accept: ("accept", (_NUMBER, _BALLOT, _VALUE)),
    Accepted: ("accepted", (_NUMBER, _BALLOT)),
    Rejected: ("rejected", (_NUMBER, _BALLOT)),
    Decided: ("decided", (_VALUE,)),
}
_BY_WORD = {word: (kind, parts) for kind, (word, parts) in _KINDS.items()}
_NAMES = {kind: tuple(field.name for field in fields(kind)) for kind in _KINDS}
_HEAD = (_number, _text(MAX_NAME), _name, _number, _text(MAX_ADDRESS), _text(MAX_NAME), _text(16))


def encode(envelope: Envelope) -> bytes:
    """A frame, without its length."""
    body = envelope.body
    word, parts = _KINDS[type(body)]
    head = [VERSION, envelope.job, envelope.sender, envelope.incarnation, envelope.address, envelope.receiver, word]
    values = [part.write(getattr(body, name)) for part, name in zip(parts, _NAMES[type(body)], strict=True)]
    return json.dumps(head + values, separators=(",", ":")).encode()


def decode(frame: bytes) -> Envelope:
    """The message in a frame.

    Raises:
        MessageError: it is too long, of another version, or no message.

    Example:
        >>> sent = Envelope("job", "a", 0, "10.0.0.1:7000", "b", Heartbeat(epoch=3, started=17))
        >>> decode(encode(sent)) == sent
        True
    """
    if len(frame) > MAX_FRAME:
        raise MessageError(f"a frame of {len(frame)} bytes, at most {MAX_FRAME} are allowed")
    try:
        data = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {error}") from None
    if type(data) is not list or len(data) < len(_HEAD):
        raise MessageError(f"not a message: {frame[:80]!r}")
    version, job, sender, incarnation, address, receiver, word = _row(data[: len(_HEAD)], *_HEAD)
    if version != VERSION or word not in _BY_WORD:
        raise MessageError(f"a message of kind {word!r}, version {version}; this is version {VERSION}")
    kind, parts = _BY_WORD[word]
    values = _row(data[len(_HEAD) :], *(part.read for part in parts))
    return Envelope(job, sender, incarnation, address, receiver, kind(*values))

"""Messages and records of the membership protocol as bytes."""

from __future__ import annotations

import random

import pytest

from bagua.membership import Ballot, Envelope, Epoch, Member, MessageError, Record, decode, encode
from bagua.membership.messages import (
    MAX_FRAME,
    MAX_MEMBERS,
    MAX_SEAT,
    MAX_SEATS,
    Accept,
    Accepted,
    Body,
    Decided,
    Heartbeat,
    Join,
    Prepare,
    Promise,
    Rejected,
    Report,
    Request,
    Rest,
    Resting,
)

EPOCH = Epoch.first([Member("a", 0, "h:1", "p", seats=(0, 3)), Member("b", 2, "h:2")], tie_break=True)
EPOCH_TEXT = '[1,0,1,0,[["a",0,"h:1","p",0,true,[0,3]],["b",2,"h:2","",0,true,[0]]],true,"start"]'
BALLOT = Ballot(3, "b")


def envelope(body: Body) -> Envelope:
    return Envelope("job", "a", 1, "h:1", "b", body)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (Heartbeat(4, 17, True), '"heartbeat",4,17,true'),
        (Join(4, "p"), '"join",4,"p"'),
        (Request(4, "why", True), '"request",4,"why",true'),
        (Rest(4, 17), '"rest",4,17'),
        (Resting(4), '"resting",4'),
        (Prepare(4, BALLOT), '"prepare",4,[3,"b"]'),
        (
            Promise(4, BALLOT, Report(17, "p", True, False, (1,), (0, 3)), BALLOT, EPOCH),
            f'"promise",4,[3,"b"],[17,"p",true,false,[1],[0,3]],[3,"b"],{EPOCH_TEXT}',
        ),
        (Promise(4, BALLOT, Report(-1), None, None), '"promise",4,[3,"b"],[-1,"",false,false,[],[0]],null,null'),
        (Accept(4, BALLOT, EPOCH), f'"accept",4,[3,"b"],{EPOCH_TEXT}'),
        (Accepted(4, BALLOT), '"accepted",4,[3,"b"]'),
        (Rejected(4, BALLOT), '"rejected",4,[3,"b"]'),
        (Decided(EPOCH), f'"decided",{EPOCH_TEXT}'),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_version_4_of_a_frame(body: Body, text: str) -> None:
    """Hosts of one job may run different releases: another format needs another version."""
    frame = f'[4,"job","a",1,"h:1","b",{text}]'.encode()
    assert encode(envelope(body)) == frame and decode(frame) == envelope(body)


def test_the_longest_message_fits_a_frame() -> None:
    seats = tuple(range(MAX_SEAT - MAX_SEATS + 1, MAX_SEAT + 1))
    members = tuple(
        Member(f"{i:03}" + "n" * 61, 2**62, "a" * 128, '"' * 256, held=2**62, votes=True, seats=seats)
        for i in range(MAX_MEMBERS)
    )
    epoch = Epoch(2**62, 2**62, 2**62, 2**62, members, True, "r" * 256)
    report = Report(2**62, '"' * 256, True, True, tuple(range(MAX_MEMBERS)), seats)
    ballot = Ballot(2**62, "n" * 64)
    body = Promise(2**62, ballot, report, ballot, epoch)
    frame = encode(Envelope("j" * 64, "n" * 64, 2**62, "a" * 128, "r" * 64, body))
    assert len(frame) <= MAX_FRAME and decode(frame).body == body
    record = Record("j" * 64, "n" * 64, 0, "a" * 128, epoch, ballot, ballot, epoch)
    assert Record.recover(record.to_bytes()).accepted == epoch


def test_frames_that_are_no_messages_are_refused() -> None:
    good = encode(envelope(Accept(1, Ballot(1, "n1"), EPOCH)))
    chosen = random.Random(0)
    refused = 0
    for _ in range(3000):
        frame = bytearray(good)
        for _ in range(chosen.randint(1, 4)):
            frame[chosen.randrange(len(frame))] = chosen.choice(b'0123456789[]{},":nullx-\\ \xff')
        if chosen.random() < 0.3:
            del frame[chosen.randrange(len(frame)) :]
        try:
            assert encode(decode(bytes(frame)))
        except MessageError:
            refused += 1
    assert refused > 1000
    for frame in (b"", b"[" * 100_000, b"x" * (MAX_FRAME + 1), b"[1e400,0,0,0,0,0,0]", b"[NaN,0,0,0,0,0,0]"):
        with pytest.raises(MessageError):
            decode(frame)


@pytest.mark.parametrize(
    "seats",
    ["[]", "[0,0]", "[3,0]", "[-1]", f"[{MAX_SEAT + 1}]", str(list(range(MAX_SEATS + 1))), "0", "null", "[true]"],
)
def test_ranks_that_cannot_be_are_refused(seats: str) -> None:
    frame = encode(envelope(Decided(EPOCH)))
    assert decode(frame.replace(b"[0,3]", b"[1]"))
    with pytest.raises(MessageError):
        decode(frame.replace(b"[0,3]", seats.encode()))


@pytest.mark.parametrize("junk", [b"", b"[]", b"{}", b"null", b'["j","n",0,"a",1,null,null,null]', b"\xff"])
def test_a_broken_record_is_refused(junk: bytes) -> None:
    with pytest.raises(MessageError):
        Record.recover(junk)

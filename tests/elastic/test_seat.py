"""A rank's view of the membership, through an agent in its own process."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from bagua.membership import Agent, Epoch, Member, Options, Record, Verdict
from bagua.membership.seat import LocalSeat, payload_of, store_in, view_of
from bagua.membership.transport import Transport

TOKEN = b"sixteen bytes or more"


@pytest.fixture
def seats() -> Iterator[list[LocalSeat]]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in listeners]
    members = [Member(f"n{i}", 0, each, payload_of(f"store{i}:1")) for i, each in enumerate(addresses)]
    epoch, options = Epoch.first(members), Options(detect_s=20.0)
    transports = [
        Transport(
            Agent(Record("job", m.name, 0, m.address), options, time.monotonic(), epoch=epoch, payload=m.payload),
            sock,
            TOKEN,
        )
        for m, sock in zip(members, listeners, strict=True)
    ]
    end = time.monotonic() + 60
    while any(len(each.connected) < 2 for each in transports):
        assert time.monotonic() < end, "the agents did not connect"
        time.sleep(0.01)
    made = [LocalSeat(each) for each in transports]
    yield made
    for seat in made:
        seat.close()


def test_a_lost_host_changes_the_view_of_the_others(seats: list[LocalSeat]) -> None:
    first = seats[1].view()
    assert first is not None and (first.group, first.rank, first.members) == (1, 1, ("n0", "n1", "n2"))
    assert first.store == "store0:1"
    assert seats[1].start_step(1, 0) is seats[1].finish_step(1, 0) is Verdict.GRANTED
    seats[0].close()
    view = seats[1].await_group(1, 60)
    assert (view.rank, view.members, view.store, view.step) == (0, ("n1", "n2"), "store1:1", 1)
    assert seats[1].finish_step(1, 1) is Verdict.DENIED
    with pytest.raises(TimeoutError, match="no new epoch within 0"):
        seats[1].await_group(view.group, 0)


def test_a_failed_exchange_opens_the_groups_anew(seats: list[LocalSeat]) -> None:
    seats[2].exchange_failed(1)
    views = [seat.await_group(1, 60) for seat in seats]
    assert {view.members for view in views} == {("n0", "n1", "n2")}
    assert [view.rank for view in views] == [0, 1, 2] and len({view.group for view in views}) == 1


def test_a_host_that_only_learns_has_no_rank() -> None:
    epoch = Epoch.first([Member("a", 0, "a:1", payload_of("a:2"))])
    assert view_of(epoch, "b", 0).rank is None
    assert view_of(epoch, "a", 1).rank is None  # it has been recovered since: its weights are gone


@pytest.mark.parametrize("payload", ["", "{}", "[]", '{"store": 1}', "no json"])
def test_a_payload_of_others_is_refused(payload: str) -> None:
    with pytest.raises(ValueError, match="expected the address of a store"):
        store_in(payload)

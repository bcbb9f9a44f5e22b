"""A rank's view of the membership, through an agent in its own process or in that of its launcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua.membership import Epoch, Member, Verdict
from bagua.membership.seat import payload_of, store_in, view_of
from tests.elastic.hosts import Hosts


@pytest.fixture(params=["local", "remote"])
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path if request.param == "remote" else None)
    yield made
    made.close()


def test_a_lost_host_changes_the_view_of_the_others(hosts: Hosts) -> None:
    seats = hosts.seats
    first = seats[1].view()
    assert first is not None and (first.group, first.rank, first.members) == (1, 1, ("n0", "n1", "n2"))
    assert first.store == "store0:1"
    assert seats[1].start_step(1, 0) is seats[1].finish_step(1, 0) is Verdict.GRANTED
    hosts.lose(0)
    view = seats[1].await_group(1, 60)
    assert (view.rank, view.members, view.store, view.step) == (0, ("n1", "n2"), "store1:1", 1)
    assert seats[1].finish_step(1, 1) is Verdict.DENIED
    with pytest.raises(TimeoutError, match="no new epoch within 0"):
        seats[1].await_group(view.group, 0)


def test_a_failed_exchange_opens_the_groups_anew(hosts: Hosts) -> None:
    hosts.seats[2].exchange_failed(1)
    views = [seat.await_group(1, 60) for seat in hosts.seats]
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

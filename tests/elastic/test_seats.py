"""The ranks of one host, as its agent knows them."""

from __future__ import annotations

import pytest

from bagua.membership import Agent, Epoch, Member, Options, Record, Verdict
from bagua.membership.epoch import NO_MODEL
from bagua.membership.messages import MAX_SEATS
from bagua.membership.seats import Seats

A, B = Member("a", 0, "a:1", seats=(0, 1)), Member("b", 0, "b:1")
FIRST = Epoch.first([A, B])


def later(*members: Member, number: int = 2, step: int = 0) -> Epoch:
    return Epoch(number, step, number, step, members)


def training() -> Seats:
    """Both ranks of host a train."""
    seats = Seats((0, 1))
    seats.adopt(FIRST, FIRST.by_name["a"])
    seats.found()
    return seats


def learning(*numbers: int) -> Seats:
    """Ranks that were started on a host which has no weights."""
    seats = Seats(())
    me = Member("a", 0, "a:1", seats=())
    seats.adopt(later(me, FIRST.by_name["b"]), me)
    for number in numbers:
        seats.add(number)
    return seats


def held(seats: Seats) -> list[int | None]:
    found = (seats.progress(number) for number in (0, 1))
    return [None if each is None else each.held for each in found]


def test_a_step_counts_for_the_rank_that_has_made_it() -> None:
    """And if this one dies, nobody on its host has it, whatever the host has promised."""
    seats = training()
    first, second = seats.progress(0), seats.progress(1)
    assert first is not None and second is not None
    assert first.start(1, 0) is Verdict.GRANTED and first.finish(1, 0) is Verdict.GRANTED
    assert (held(seats), seats.held) == ([1, 0], 1)
    seats.fenced = True
    assert second.finish(1, 0) is Verdict.WAIT
    seats.remove(0)
    assert (seats.held, seats.listed(0.0)) == (0, (1,))
    # The epoch was made of the promise: the rank that is left fetches from another host, or the next epoch goes back.
    me = Member("a", 0, "a:1", held=1, votes=True, seats=(0, 1))
    seats.adopt(later(me, step=1), me)
    assert second.behind and second.start(2, 0) is Verdict.DENIED and seats.listed(0.0) != me.seats


def test_a_host_without_its_last_rank_has_no_weights() -> None:
    seats = training()
    seats.remove(0)
    seats.remove(1)
    assert (seats.held, seats.listed(0.0)) == (NO_MODEL, ())
    seats.remove(1)


def test_one_rank_fetches_for_all_and_another_one_if_it_dies() -> None:
    seats = learning(0, 1)
    assert not seats.learns(0) and not seats.learns(1), "none is ready"
    seats.ready(1, 0.0)
    seats.ready(0, 0.0)
    assert [seats.learns(number) for number in (0, 1)] == [False, True]
    seats.remove(1)
    assert seats.learns(0)
    assert seats.fetched(0, 2, 0, 0.0) is Verdict.GRANTED and not seats.learns(0)


def test_the_ranks_of_a_host_come_together() -> None:
    seats = learning(0, 1)
    seats.ready(0, 5.0)
    assert seats.fetched(0, 2, 0, 6.0) is Verdict.WAIT and seats.listed(6.0) == ()
    seats.ready(1, 7.0)
    assert seats.fetched(0, 2, 0, 7.0) is Verdict.GRANTED and seats.listed(7.0) == (0, 1)


def test_a_rank_that_does_not_come_is_not_waited_for_without_end() -> None:
    seats = learning(0, 1)
    seats.ready(0, 5.0)
    assert seats.fetched(0, 2, 0, 14.9) is Verdict.WAIT
    assert seats.fetched(0, 2, 0, 15.1) is Verdict.GRANTED and seats.listed(15.1) == (0,)
    seats.ready(1, 20.0)
    assert seats.listed(20.0) == (0, 1)


def test_a_rank_that_has_died_is_not_waited_for() -> None:
    seats = learning(0, 1)
    seats.ready(0, 5.0)
    seats.remove(1)
    assert seats.fetched(0, 2, 0, 5.0) is Verdict.GRANTED and seats.listed(5.0) == (0,)


def test_a_rank_comes_back_beside_another_one() -> None:
    """It is listed without weights, and has them once it has fetched them."""
    seats = training()
    seats.remove(0)
    seats.add(2)
    assert seats.listed(0.0) == (1,)
    seats.ready(2, 0.0)
    assert seats.listed(0.0) == (1, 2) and not seats.learns(2)
    me = Member("a", 0, "a:1", held=0, votes=True, seats=(1, 2))
    seats.adopt(later(me), me)
    progress = seats.progress(2)
    assert progress is not None and progress.behind and not seats.waits and seats.listed(0.0) == (1, 2)
    assert seats.fetched(2, 2, 0, 0.0) is Verdict.GRANTED and seats.waits


def test_a_host_that_was_left_out_lists_nobody_who_has_not_noticed() -> None:
    """A rank that still trains would take its weights, which do not count, for those of the job."""
    seats = training()
    seats.adopt(later(FIRST.by_name["b"]), None)
    assert held(seats) == [NO_MODEL, NO_MODEL]
    me = Member("a", 0, "a:1", seats=())
    seats.adopt(later(me, FIRST.by_name["b"], number=3), me)
    seats.ready(0, 0.0)
    assert seats.learns(0) and seats.fetched(0, 3, 0, 1.0) is Verdict.WAIT, "the other one has yet to find out"
    seats.ready(1, 2.0)
    assert seats.fetched(0, 3, 0, 2.0) is Verdict.GRANTED and seats.listed(2.0) == (0, 1)


def test_a_host_is_as_slow_as_its_slowest_rank() -> None:
    seats = training()
    first = seats.progress(0)
    assert first is not None and first.start(1, 0) is Verdict.GRANTED
    assert seats.started == 0
    seats.over(1)
    assert seats.started == 1, "one that has trained to the end is not waited for"


def test_a_host_waits_for_others_when_its_slowest_ranks_do() -> None:
    seats = training()
    first, second = seats.progress(0), seats.progress(1)
    assert first is not None and second is not None
    for each in (first, second):
        assert each.start(1, 0) is Verdict.GRANTED
    first.arrive(1, 0)
    assert (seats.started, seats.arrived) == (1, False), "the second one is awaited by the first one, too"
    second.arrive(1, 0)
    assert (seats.started, seats.arrived) == (1, True)
    assert first.finish(1, 0) is Verdict.GRANTED
    assert (seats.started, seats.arrived) == (1, True), "the second one has yet to hear the end of the exchange"
    assert second.finish(1, 0) is Verdict.GRANTED
    assert (seats.started, seats.arrived) == (2, False)
    assert second.start(1, 1) is Verdict.GRANTED
    second.arrive(1, 1)
    assert not seats.arrived
    seats.over(0)
    assert (seats.started, seats.arrived) == (2, True)
    seats.remove(1)
    seats.remove(0)
    assert (seats.started, seats.arrived) == (0, False)


@pytest.mark.parametrize("number", [0, -1, 10**6 + 1])
def test_a_rank_that_cannot_be(number: int) -> None:
    with pytest.raises(ValueError, match=f"^seat {number}: a host has up to {MAX_SEATS} ranks"):
        training().add(number)
    with pytest.raises(ValueError, match=f"^seat {MAX_SEATS}: a host has up to {MAX_SEATS} ranks"):
        Seats(range(MAX_SEATS + 1))


def test_an_agent_wants_an_epoch_when_its_ranks_change() -> None:
    alone = Epoch.first([A])
    agent = Agent(Record("job", "a", 0, "a:1"), Options(), 0.0, epoch=alone, seats=(0, 1))
    agent.rank_ended(1.0, 1)
    assert agent.epoch is not None and agent.epoch.trainers[0].seats == (0,)
    assert (agent.epoch.number, agent.epoch.group) == (2, 2)
    assert agent.start_step(2, 0, 1) is Verdict.DENIED and agent.start_step(2, 0, 0) is Verdict.GRANTED
    agent.rank_started(3)
    agent.rank_wants_weights(2.0, 3)
    assert agent.finish_step(2, 0, 0) is Verdict.GRANTED and agent.start_step(2, 1, 0) is Verdict.GRANTED
    assert agent.finish_step(2, 1, 0) is Verdict.GRANTED and agent.epoch.number == 2, "no step is broken off for it"
    agent.start_step(2, 2, 0)
    assert agent.epoch.trainers[0].seats == (0, 3) and (agent.epoch.group, agent.epoch.step) == (3, 2)

"""One rule of the membership protocol each, by hand."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from bagua.membership import (
    Agent,
    Ballot,
    Blocked,
    Envelope,
    Epoch,
    EpochBegan,
    Excluded,
    Left,
    Member,
    Options,
    Persist,
    Record,
    Send,
    Slow,
    Verdict,
)
from bagua.membership.composition import Reported, compose
from bagua.membership.epoch import NO_MODEL, is_quorum
from bagua.membership.messages import (
    Accept,
    Decided,
    Heartbeat,
    Join,
    Prepare,
    Promise,
    Report,
    Request,
)


def first(size: int, **options: bool) -> Epoch:
    return Epoch.first([Member(f"n{i}", 0, f"host{i}:1") for i in range(size)], **options)


def an_agent(epoch: Epoch, name: str = "n0", **options: float) -> Agent:
    agent = Agent(Record("job", name, 0, epoch.by_name[name].address), Options(**options), 0.0, epoch=epoch)
    agent.take()
    return agent


def from_(name: str, body: object, to: str = "n0", incarnation: int = 0) -> Envelope:
    return Envelope("job", name, incarnation, f"host{name[1:]}:1", to, body)  # type: ignore[arg-type]


def sent(agent: Agent, kind: type) -> list[Send]:
    return [a for a in agent.take() if isinstance(a, Send) and isinstance(a.envelope.body, kind)]


def promises(epoch: Epoch, reports: dict[str, Report]) -> dict[str, Reported]:
    ballot = Ballot(1, "n0")
    return {name: Reported(0, Promise(epoch.number, ballot, report, None, None)) for name, report in reports.items()}


def composed(epoch: Epoch, reports: dict[str, Report], joins: Iterable[Member] = ()) -> Epoch | None:
    return compose(epoch, promises(epoch, reports), joins, "test")


def names(epoch: Epoch | None) -> list[str]:
    assert epoch is not None
    return [m.name for m in epoch.members]


@pytest.mark.parametrize("size", range(1, 8))
def test_two_quorums_share_a_voter(size: int) -> None:
    for tie_break in (False, True):
        epoch = first(size, tie_break=tie_break)
        subsets = [{f"n{i}" for i in range(size) if mask >> i & 1} for mask in range(2**size)]
        quorums = [s for s in subsets if is_quorum(epoch, s)]
        assert quorums and all(a & b for a in quorums for b in quorums)
        assert tie_break <= any(2 * len(q) <= size for q in quorums) or size % 2


@pytest.mark.parametrize("names", [[], ["a", "b", "a"]])
def test_founders_have_names_of_their_own(names: list[str]) -> None:
    with pytest.raises(ValueError, match="members: expected one or more"):
        Epoch.first([Member(name, 0, "host:1") for name in names])


def test_a_host_that_has_promised_completes_no_step() -> None:
    agent = an_agent(first(3))
    assert agent.start_step(1, 0) is Verdict.GRANTED
    assert agent.finish_step(1, 0) is Verdict.GRANTED
    assert agent.finish_step(1, 0) is Verdict.GRANTED  # another rank of the host
    agent.receive(0.1, from_("n1", Prepare(1, Ballot(1, "n1"))))
    answer = sent(agent, Promise)[0].envelope.body
    assert isinstance(answer, Promise) and answer.report.held == 1
    assert agent.finish_step(1, 1) is agent.start_step(1, 1) is Verdict.WAIT
    assert agent.finish_step(1, 0) is Verdict.GRANTED  # it is in the report
    assert agent.held == 1


def test_accepting_is_a_promise_too() -> None:
    agent = an_agent(first(3))
    value = composed(first(3), {"n1": Report(0), "n2": Report(0)})
    assert value is not None
    agent.receive(0.1, from_("n1", Accept(1, Ballot(1, "n1"), value)))
    assert agent.finish_step(1, 0) is Verdict.WAIT and agent.record.accepted == value


def test_the_exchange_goes_on_if_the_same_hosts_train_on() -> None:
    epoch = first(2)
    agent = an_agent(epoch)
    agent.receive(0.1, from_("n1", Prepare(1, Ballot(1, "n1"))))
    newcomer = Member("n5", 0, "host5:1")
    value = composed(epoch, {"n0": Report(0), "n1": Report(1)}, [newcomer])
    assert value is not None and (value.group, value.step) == (1, 1)
    agent.receive(0.2, from_("n1", Decided(value)))
    assert [type(a) for a in agent.take() if not isinstance(a, Send)] == [Persist, Persist, EpochBegan]
    assert not agent.behind and agent.finish_step(1, 0) is Verdict.GRANTED


def test_a_host_that_did_not_complete_the_step_fetches_it_if_groups_are_opened_anew() -> None:
    epoch = first(3)
    agent = an_agent(epoch)
    value = composed(epoch, {"n0": Report(0), "n1": Report(1)})
    assert value is not None and (value.group, value.group_step) == (2, 1)
    agent.receive(0.2, from_("n1", Decided(value)))
    assert agent.behind and agent.finish_step(1, 0) is agent.start_step(2, 0) is Verdict.DENIED
    assert [m.name for m in value.sources] == ["n1"]
    assert agent.weights_fetched(2, 1) is Verdict.GRANTED
    assert agent.start_step(2, 1) is Verdict.GRANTED


def test_fetched_weights_whose_last_step_does_not_count_are_refused() -> None:
    """n0 reported step 0; n1, which alone had completed it, is lost before n0 has its weights in place."""
    epoch = first(3)
    agent = an_agent(epoch)
    second = composed(epoch, {"n0": Report(0), "n1": Report(1), "n2": Report(0, broken=True)})
    assert second is not None
    agent.receive(0.1, from_("n1", Decided(second)))
    assert agent.behind
    agent.receive(0.2, from_("n2", Prepare(2, Ballot(1, "n2"))))
    assert agent.weights_fetched(2, 1) is Verdict.WAIT
    third = composed(second, {"n0": Report(0), "n2": Report(0)})
    assert third is not None and third.step == 0
    agent.receive(0.3, from_("n2", Decided(third)))
    assert agent.weights_fetched(2, 1) is Verdict.DENIED
    assert not agent.behind and agent.start_step(third.group, 0) is Verdict.GRANTED


def test_a_learner_becomes_a_trainer_once_it_has_the_weights() -> None:
    epoch = first(2)
    second = composed(epoch, {"n0": Report(3), "n1": Report(3)}, [Member("n5", 0, "host5:1")])
    assert second is not None and second.voters == ("n0", "n1") and not second.members[2].trains
    late = Agent(Record("job", "n5", 0, "host5:1"), Options(), 0.0, contacts=["host0:1"])
    late.tick(0.0)
    assert [s.address for s in sent(late, Join)] == ["host0:1"]
    late.receive(0.1, from_("n0", Decided(second), "n5"))
    assert late.start_step(1, 3) is Verdict.DENIED and late.held == NO_MODEL
    assert late.weights_fetched(2, 4) is Verdict.GRANTED
    late.tick(1.0)
    assert sent(late, Request)[0].envelope.body == Request(2, "n5 has the weights", can_wait=True)
    third = composed(second, {"n0": Report(5), "n1": Report(4), "n5": Report(4)})
    assert third is not None and third.voters == ("n0", "n1", "n5") and third.group == 3


def test_a_step_that_only_a_learner_has_fetched_counts() -> None:
    """The trainer that completed it is lost, but its weights are not."""
    second = composed(first(3), {f"n{i}": Report(3) for i in range(3)}, [Member("n5", 0, "host5:1")])
    assert second is not None
    third = composed(second, {"n0": Report(3), "n1": Report(3), "n5": Report(4)})
    assert third is not None and third.step == third.group_step == 4
    assert [m.name for m in third.sources] == ["n5"] and third.voters == ("n0", "n1", "n5")


def test_newcomers_without_weights_never_decide_nor_lead() -> None:
    joins = [Member(f"n{i}", 0, f"host{i}:1") for i in (7, 8)]
    second = composed(first(1), {"n0": Report(5)}, joins)
    assert second is not None and second.voters == ("n0",) and names(second) == ["n0", "n7", "n8"]
    assert not is_quorum(second, {"n7", "n8"})
    assert composed(second, {"n7": Report(NO_MODEL), "n8": Report(NO_MODEL)}) is None
    assert composed(second, {"n0": Report(NO_MODEL), "n7": Report(NO_MODEL)}, joins) is None


def test_of_hosts_that_cannot_hear_each_other_one_goes() -> None:
    epoch = first(4)
    held = {f"n{i}": Report(2) for i in range(4)}
    assert names(composed(epoch, held | {"n1": Report(2, unheard=(3,))})) == ["n0", "n1", "n2"]
    assert names(composed(epoch, held | {"n1": Report(2, unheard=(0, 2, 3))})) == ["n0", "n2", "n3"]
    late = {f"n{i}": Report(2, unheard=(0,)) for i in (1, 2, 3)}
    assert names(composed(epoch, held | late)) == ["n1", "n2", "n3"]
    assert names(composed(epoch, held | {"n3": Report(2, unheard=(250,))})) == ["n0", "n1", "n2", "n3"]


def test_the_last_host_with_weights_leaves_when_another_has_them() -> None:
    second = composed(first(1), {"n0": Report(5)}, [Member("n5", 0, "host5:1")])
    assert second is not None
    third = composed(second, {"n0": Report(5, leaving=True), "n5": Report(NO_MODEL)})
    assert names(third) == ["n0", "n5"]
    all_leave = {"n0": Report(5, leaving=True), "n1": Report(5, leaving=True)}
    assert composed(first(2), all_leave) is None
    assert names(composed(first(2), all_leave, [Member("n5", 0, "host5:1")])) == ["n0", "n1", "n5"]
    agent = an_agent(first(2))
    agent.leave(1.0)
    agent.tick(1.0)
    assert sent(agent, Prepare)
    agent.receive(1.1, from_("n1", Promise(1, Ballot(1, "n0"), Report(0), None, None)))
    assert agent.record.accepted is not None and names(agent.record.accepted) == ["n1"]


def test_a_host_that_leaves_stays_until_a_quorum_knows() -> None:
    epoch = first(3)
    agent = an_agent(epoch)
    agent.leave(0.1)
    value = composed(epoch, {"n0": Report(0, leaving=True), "n1": Report(0), "n2": Report(0)})
    assert value is not None and names(value) == ["n1", "n2"]
    agent.receive(0.2, from_("n1", Decided(value)))
    assert not any(isinstance(a, Left) for a in agent.take())
    agent.tick(1.0)
    assert [s.envelope.receiver for s in sent(agent, Heartbeat)] == ["n2"]  # n1 knows
    for name, knows in (("n2", False), ("n2", True)):
        other = an_agent(epoch, name)
        if knows:
            other.receive(0.3, from_("n0", Decided(value), name))
            other.take()
        other.receive(1.1, from_("n0", Heartbeat(2, 0), name))
        answer = next(a for a in other.take() if isinstance(a, Send) and a.envelope.receiver == "n0")
        agent.receive(1.2, answer.envelope)
        left = any(isinstance(a, Left) for a in agent.take())
        assert left == (name == "n2" and knows)
    # Who knew of an epoch need not know of the next.
    following = composed(value, {"n1": Report(0), "n2": Report(0)})
    assert following is not None
    agent.receive(2.0, from_("n1", Decided(following)))
    assert not any(isinstance(a, Left) for a in agent.take())


def test_a_member_that_is_left_out_gives_its_weights_up_and_asks_to_join() -> None:
    epoch = first(3)
    agent = an_agent(epoch)
    assert agent.finish_step(1, 0) is Verdict.GRANTED
    value = composed(epoch, {"n1": Report(0), "n2": Report(0)})
    assert value is not None
    agent.receive(0.2, from_("n1", Decided(value)))
    assert any(isinstance(a, Excluded) for a in agent.take())
    assert agent.held == NO_MODEL and agent.finish_step(1, 1) is Verdict.DENIED
    agent.tick(5.0)
    assert {s.address for s in sent(agent, Join)} == {"host1:1", "host2:1"}


def test_a_recovered_voter_keeps_its_promise_and_what_it_accepted() -> None:
    epoch = first(3)
    agent = an_agent(epoch)
    value = composed(epoch, {"n1": Report(0), "n2": Report(0)})
    assert value is not None
    agent.receive(0.1, from_("n1", Accept(1, Ballot(4, "n1"), value)))
    records = [a.record for a in agent.take() if isinstance(a, Persist)]
    again = Agent(Record.recover(records[-1]), Options(), 9.0)
    assert again.held == NO_MODEL and again.member is None and again.fenced
    again.receive(9.1, from_("n2", Prepare(1, Ballot(3, "n2"))))
    assert not sent(again, Promise)
    again.receive(9.2, from_("n2", Prepare(1, Ballot(5, "n2"))))
    answer = sent(again, Promise)[0].envelope
    assert answer.incarnation == 1 and isinstance(answer.body, Promise)
    assert answer.body.accepted == value and answer.body.report.held == NO_MODEL
    again.receive(9.3, from_("n2", Decided(value)))
    assert names(again.epoch) == ["n1", "n2"]


def test_the_record_is_kept_before_the_promise_is_sent() -> None:
    agent = an_agent(first(3))
    agent.receive(0.1, from_("n1", Prepare(1, Ballot(1, "n1"))))
    assert [type(a) for a in agent.take()] == [Persist, Send]


@pytest.mark.parametrize(("held", "asks"), [(2, False), (4, True)])
def test_a_member_that_is_steps_behind_does_not_ask_for_a_vote_in_vain(held: int, asks: bool) -> None:
    """It would get none, and ask again at once: epochs would follow each other as fast as messages."""
    epoch = Epoch(2, 5, 1, 0, (Member("n0", 0, "host0:1", "", held), Member("n1", 0, "host1:1", "", 5, True)))
    agent = an_agent(first(2))
    for step in range(held):
        assert agent.finish_step(1, step) is Verdict.GRANTED
    agent.learn(epoch)
    agent.take()
    agent.tick(10.0)
    assert bool(sent(agent, Request)) is asks


def test_silence_is_a_loss_and_slowness_is_named() -> None:
    agent = an_agent(first(3), detect_s=2.0, max_wait_s=10.0)
    assert agent.start_step(1, 0) is Verdict.GRANTED
    slow: list[str] = []
    now = 0.0
    while not agent.suspected:
        now += 0.5
        agent.receive(now, from_("n1", Heartbeat(1, 1)))
        agent.receive(now, from_("n2", Heartbeat(1, 0)))
        agent.tick(now)
        slow += [a.name for a in agent.take() if isinstance(a, Slow)]
    assert slow == ["n2"] and list(agent.suspected) == ["n2"] and 10.0 < now < 12.0
    agent = an_agent(first(3), detect_s=2.0)
    for tick in range(1, 10):
        agent.receive(tick / 2, from_("n1", Heartbeat(1, 0)))
        agent.tick(tick / 2)
    assert "silent" in agent.suspected["n2"] and "n1" not in agent.suspected


def test_steps_that_are_shorter_than_the_time_between_heartbeats_make_nobody_slow() -> None:
    """What is heard of a peer is always some steps old. Who goes on to the next step was not kept waiting."""
    agent = an_agent(first(2), detect_s=2.0, max_wait_s=4.0)
    for step in range(200):
        now = step / 10
        if step % 5 == 0:
            agent.receive(now, from_("n1", Heartbeat(1, max(0, step - 5))))
        assert agent.start_step(1, step) is agent.finish_step(1, step) is Verdict.GRANTED
        agent.tick(now)
        assert not agent.suspected and not [a for a in agent.take() if isinstance(a, Slow)]


def test_of_those_that_have_begun_a_step_only_who_has_not_arrived_is_slow() -> None:
    """As in an interval of local steps, which all begin, and at whose end all wait for one."""
    agent = an_agent(first(3), detect_s=2.0, max_wait_s=10.0)
    assert agent.start_step(1, 0) is Verdict.GRANTED
    slow: list[tuple[str, float]] = []
    now = 0.0
    while not agent.suspected:
        now += 0.5
        if now == 5.0:
            assert not slow, "nobody waits yet"
            agent.arrived(now, 1, 0)
        agent.receive(now, from_("n1", Heartbeat(1, 1, arrived=True)))
        agent.receive(now, from_("n2", Heartbeat(1, 1)))
        agent.tick(now)
        slow += [(a.name, a.waited_s) for a in agent.take() if isinstance(a, Slow)]
    assert [name for name, _ in slow] == ["n2"] and slow[0][1] < 3.0
    assert list(agent.suspected) == ["n2"] and 15.0 < now < 17.0


@pytest.mark.parametrize(("waits_s", "named"), [(0.9, True), (0.1, False)])
def test_who_is_waited_for_in_each_step_is_slow_though_no_wait_is_long(waits_s: float, named: bool) -> None:
    agent = an_agent(first(3), detect_s=2.0, max_wait_s=5.0)
    slow: list[str] = []
    for tenth in range(300):
        now, step = tenth / 10, tenth // 10
        if tenth % 10 == 0:
            assert agent.start_step(1, step) is Verdict.GRANTED
        waits = tenth % 10 >= 10 - 10 * waits_s
        if waits:
            agent.arrived(now, 1, step)
        if tenth % 5 == 4:
            agent.receive(now, from_("n1", Heartbeat(1, step + 1, arrived=waits)))
            agent.receive(now, from_("n2", Heartbeat(1, step + 1)))
        if tenth % 10 == 9:
            assert agent.finish_step(1, step) is Verdict.GRANTED
        agent.tick(now)
        assert not agent.suspected
        slow += [each.name for each in agent.take() if isinstance(each, Slow)]
    assert set(slow) == ({"n2"} if named else set()) and len(slow) <= 2


def test_nobody_waits_after_a_step_is_completed() -> None:
    """The last one to arrive did not have to wait, and says so in no exchange."""
    agent, last = an_agent(first(2), detect_s=2.0), an_agent(first(2), "n1", detect_s=2.0)
    for each in (agent, last):
        assert each.start_step(1, 0) is Verdict.GRANTED
    agent.arrived(0.1, 1, 0)
    for each in (agent, last):
        assert each.finish_step(1, 0) is Verdict.GRANTED
    for tick in range(1, 40):
        last.tick(tick / 2)
        (beat,) = sent(last, Heartbeat)
        agent.receive(tick / 2, beat.envelope)
        agent.tick(tick / 2)
        actions = agent.take()
        assert not [each for each in actions if isinstance(each, Slow)]
        for each in actions:
            if isinstance(each, Send):
                last.receive(tick / 2, each.envelope)


def test_a_closed_connection_is_a_loss_at_once_unless_heard_again() -> None:
    agent = an_agent(first(3))
    agent.closed(0.1, "n2")
    assert list(agent.suspected) == ["n2"] and sent(agent, Prepare)
    agent.receive(0.2, from_("n2", Heartbeat(1, 0)))
    assert not agent.suspected


def test_a_host_that_dies_while_an_epoch_is_decided_is_lost_at_once() -> None:
    """The epoch still lists it, since it has reported before; nobody waits for its silence."""
    agent = an_agent(first(4), detect_s=100.0)
    value = composed(first(4), {f"n{i}": Report(0) for i in range(3)})  # n3 is lost
    agent.closed(0.1, "n2")
    agent.take()
    agent.receive(0.2, from_("n1", Decided(value)))
    assert names(agent.epoch) == ["n0", "n1", "n2"]
    assert agent.suspected == {"n2": "its connection was closed"} and sent(agent, Prepare)
    agent.receive(0.3, from_("n2", Heartbeat(2, 0)))
    assert not agent.suspected, "it has another connection"


def test_a_process_that_was_stopped_listens_before_it_suspects() -> None:
    agent = an_agent(first(3))
    agent.tick(0.5)
    agent.tick(30.0)
    assert not agent.suspected and not sent(agent, Prepare)


def test_half_of_the_members_waits_and_says_so() -> None:
    agent = an_agent(first(2), detect_s=1.0)
    blocked: list[str] = []
    for tick in range(1, 100):
        agent.tick(tick / 10)
        blocked += [a.reason for a in agent.take() if isinstance(a, Blocked)]
    assert blocked == ["no majority of epoch 1; no answer from n1"]
    assert agent.epoch == first(2) and agent.start_step(1, 0) is Verdict.WAIT


def test_the_half_with_the_first_voter_goes_on_with_a_tie_break() -> None:
    agent = an_agent(first(2, tie_break=True), detect_s=1.0)
    for tick in range(1, 50):
        agent.tick(tick / 10)
    assert names(agent.epoch) == ["n0"] and agent.start_step(2, 0) is Verdict.GRANTED
    other = an_agent(first(2, tie_break=True), "n1", detect_s=1.0)
    for tick in range(1, 50):
        other.tick(tick / 10)
    assert other.epoch is not None and other.epoch.number == 1


def test_messages_of_another_job_receiver_or_life_are_ignored() -> None:
    agent = an_agent(first(3))
    prepare = Prepare(1, Ballot(1, "n1"))
    agent.receive(0.1, Envelope("other", "n1", 0, "host1:1", "n0", prepare))
    agent.receive(0.1, from_("n1", prepare, to="n0-before"))
    assert not agent.take() and not agent.fenced
    value = composed(first(3), {f"n{i}": Report(0) for i in range(3)})
    assert value is not None
    agent.receive(0.1, from_("n1", Accept(1, Ballot(1, "n1"), Epoch(9, 0, 1, 0, value.members))))
    assert not agent.fenced


def test_requests_and_joins_are_bounded() -> None:
    agent = an_agent(first(2))
    for i in range(1000):
        agent.receive(0.1, Envelope("job", f"x{i}", 0, f"h{i}:1", "n0", Join(1, "")))
    assert len(agent.joining) == 64


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="detect_s=0"):
        Options(detect_s=0)
    with pytest.raises(ValueError, match="max_wait_s=1"):
        Options(max_wait_s=1.0)
    with pytest.raises(ValueError, match="name: must not be empty"):
        Agent(Record("job", "", 0, "h:1"), Options(), 0.0)
    with pytest.raises(ValueError, match="at most 256"):
        Agent(Record("job", "n", 0, "h:1"), Options(), 0.0, payload="x" * 257)

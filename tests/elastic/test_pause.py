"""Before an epoch that no loss calls for, all ranks end the same step."""

from __future__ import annotations

import pytest

from bagua.membership import Agent, Ballot, Epoch, Member, Options, Record, Send, Verdict
from bagua.membership.messages import Body, Envelope, Heartbeat, Prepare, Request, Rest, Resting
from bagua.membership.progress import Progress
from tests.elastic.protocol_simulation import Cluster

READY = Request(1, "n9 has the weights", can_wait=True)
LOST = Request(1, "n9 is lost: its connection was closed")


def agents(name: str, size: int = 3) -> Agent:
    """Of a host in the first epoch, in its step 4."""
    members = [Member(f"n{i}", 0, f"host{i}:1") for i in range(size)]
    members.append(Member("n9", 0, "host9:1"))
    agent = Agent(Record("job", name, 0, f"host{name[1:]}:1"), Options(), 0.0, epoch=Epoch.first(members))
    for step in range(4):
        assert agent.start_step(1, step) is agent.finish_step(1, step) is Verdict.GRANTED
    assert agent.start_step(1, 4) is Verdict.GRANTED
    agent.take()
    return agent


def tell(agent: Agent, now: float, sender: str, body: Body) -> None:
    agent.receive(now, Envelope("job", sender, 0, f"host{sender[1:]}:1", agent.name, body))


def sent(agent: Agent, *kinds: type) -> list[tuple[str, Body]]:
    """To whom, and what, since the last call."""
    found = [each.envelope for each in agent.take() if isinstance(each, Send)]
    return [(each.receiver, each.body) for each in found if isinstance(each.body, kinds)]


def keep_alive(agent: Agent, now: float) -> None:
    for member in ("n0", "n1", "n2", "n9"):
        if member != agent.name:
            tell(agent, now, member, Heartbeat(1, 5))


def test_a_ballot_begins_when_all_ranks_have_ended_the_same_step() -> None:
    first = agents("n0")
    tell(first, 0.1, "n9", READY)
    assert sent(first, Rest, Prepare) == [(name, Rest(1, 6)) for name in ("n1", "n2", "n9")]
    assert first.finish_step(1, 4) is first.start_step(1, 5, now=0.2) is first.finish_step(1, 5) is Verdict.GRANTED
    assert first.start_step(1, 6, now=0.3) is Verdict.WAIT and not first.fenced
    for name in ("n1", "n9", "n2"):
        assert not sent(first, Prepare)
        tell(first, 0.4, name, Resting(1))
    assert sent(first, Prepare) == [(name, Prepare(1, Ballot(1, "n0"))) for name in ("n1", "n2", "n9")]


def test_a_host_says_when_all_its_ranks_rest_and_goes_on_if_nothing_follows() -> None:
    other = agents("n1")
    tell(other, 0.1, "n0", Rest(1, 6))
    assert other.finish_step(1, 4) is other.start_step(1, 5, now=0.2) is other.finish_step(1, 5) is Verdict.GRANTED
    assert not sent(other, Resting)
    assert other.start_step(1, 6, now=0.3) is Verdict.WAIT and sent(other, Resting) == [("n0", Resting(1))]
    assert other.start_step(1, 6, now=1.2) is Verdict.WAIT and sent(other, Resting) == []
    assert other.start_step(1, 6, now=1.4) is Verdict.GRANTED


def test_nobody_rests_for_a_loss() -> None:
    first = agents("n0")
    tell(first, 0.1, "n9", READY)
    sent(first)
    tell(first, 0.2, "n2", LOST)
    assert sent(first, Prepare)


def test_a_host_that_does_not_rest_is_not_waited_for_long() -> None:
    first = agents("n0")
    tell(first, 0.1, "n9", READY)
    first.finish_step(1, 4)
    first.start_step(1, 5, now=0.2)
    first.finish_step(1, 5)
    assert first.start_step(1, 6, now=1.0) is Verdict.WAIT
    keep_alive(first, 1.0)
    tell(first, 1.1, "n9", READY)
    first.tick(1.4)
    assert not sent(first, Prepare) and first.next_tick <= 1.5 + 1e-9
    first.tick(1.5)
    assert sent(first, Prepare)


def test_steps_that_do_not_end_are_not_waited_for_long() -> None:
    first = agents("n0")
    tell(first, 0.1, "n9", READY)
    for now in (1.0, 2.0, 3.0, 4.0):
        keep_alive(first, now)
        tell(first, now, "n9", READY)
        first.tick(now)
        assert not sent(first, Prepare)
    first.tick(4.1)
    assert sent(first, Prepare)


def test_ranks_that_begin_a_step_again_train_apart_and_go_on() -> None:
    """Those of `async`, and local steps between two exchanges: an epoch costs them nothing at that point."""
    other = agents("n1")
    tell(other, 0.1, "n0", Rest(1, 6))
    assert other.start_step(1, 4, now=0.2) is Verdict.GRANTED and sent(other, Resting) == [("n0", Resting(1))]


def test_an_arrival_breaks_off_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank that trained has completed the last step that it began when the groups change."""
    adopt, broken_off = Progress.adopt, list[bool]()

    def adopts(self: Progress, epoch: Epoch, member: bool, trains: bool) -> None:
        if self.trains and self.started and epoch.group == epoch.number:
            broken_off.append(self.begun > self.held)
        adopt(self, epoch, member, trains)

    monkeypatch.setattr(Progress, "adopt", adopts)
    cluster = Cluster(1, faults=False, compute_s=[0.1] * 3, ranks=2)
    cluster.network.at(2.0, lambda: cluster._faults.start(cluster.hosts[3]))
    cluster.network.run(12.0)
    assert broken_off == [False] * 6
    joined = [epoch for epoch in cluster.decided.values() if len(epoch.trainers) > 3]
    assert joined and all(host.agent is not None and host.agent.held > joined[0].step for host in cluster.hosts[:4])

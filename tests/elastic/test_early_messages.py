"""A vote for the next epoch may overtake the decision of the last one: it is answered once that has come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua.membership import Ballot
from bagua.membership.messages import Accept, Accepted, Body, Decided, Heartbeat, Prepare, Promise
from tests.elastic.test_membership import an_agent, first, from_, sent

FIRST = first(3)
SECOND = replace(FIRST, number=2)


@pytest.mark.parametrize(
    ("early", "answer"),
    [(Prepare(2, Ballot(1, "n1")), Promise), (Accept(2, Ballot(1, "n1"), replace(FIRST, number=3)), Accepted)],
)
def test_it_is_answered_as_if_it_had_come_in_order(early: Body, answer: type) -> None:
    agent, in_order = an_agent(FIRST), an_agent(FIRST)
    agent.receive(0.1, from_("n1", early))
    (asked,) = sent(agent, Heartbeat)
    assert asked.envelope.receiver == "n1", "it asks for the decision that it lacks"
    agent.receive(0.1, from_("n2", Heartbeat(2, 0)))  # all beat when they enter an epoch
    agent.receive(0.1, from_("n2", Decided(FIRST)))  # an old one
    agent.take()
    agent.receive(0.2, from_("n2", Decided(SECOND)))
    in_order.receive(0.1, from_("n2", Decided(SECOND)))
    in_order.take()
    in_order.receive(0.2, from_("n1", early))
    (got,), (want,) = sent(agent, answer), sent(in_order, answer)
    assert got == want
    agent.receive(0.3, from_("n2", Decided(SECOND)))
    assert not sent(agent, answer), "once"


def test_it_is_forgotten_if_another_epoch_has_come_or_its_sender_is_gone() -> None:
    agent = an_agent(FIRST)
    agent.receive(0.1, from_("n1", Prepare(2, Ballot(1, "n1"))))
    agent.receive(0.2, from_("n2", Decided(replace(FIRST, number=3))))
    assert not sent(agent, Promise)
    agent = an_agent(FIRST)
    agent.receive(0.1, from_("n1", Prepare(2, Ballot(1, "n1"))))
    agent.receive(0.2, from_("n2", Decided(replace(SECOND, members=(FIRST.members[0], FIRST.members[2])))))
    assert not sent(agent, Promise)

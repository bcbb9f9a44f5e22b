"""Proposes the next epoch: collects promises and reports from the members, then puts one value to the vote (Paxos)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from bagua.membership.actions import Blocked
from bagua.membership.composition import Reported, compose, value_to_adopt
from bagua.membership.epoch import Ballot, Epoch, Member, is_quorum
from bagua.membership.messages import Accept, Accepted, Decided, Prepare, Promise
from bagua.membership.options import Options
from bagua.membership.outbox import Outbox
from bagua.membership.record import Record

__all__ = ["Proposer"]


class _Host(Protocol):
    """What a proposer needs of its agent."""

    options: Options

    @property
    def name(self) -> str: ...
    @property
    def record(self) -> Record: ...
    @property
    def epoch(self) -> Epoch | None: ...
    @property
    def now(self) -> float: ...
    @property
    def suspected(self) -> dict[str, str]: ...
    @property
    def joining(self) -> list[Member]: ...
    def cause(self) -> str: ...
    def rest(self) -> float: ...
    def promise(self, prepare: Prepare) -> Promise: ...
    def accept(self, accept: Accept) -> Accepted: ...
    def learn(self, epoch: Epoch) -> None: ...


@dataclass
class _Attempt:
    """One ballot of this proposer."""

    ballot: Ballot
    reason: str
    gather_until: float
    ends: float
    promises: dict[str, Reported] = field(default_factory=dict)
    value: Epoch | None = None
    accepted_by: set[str] = field(default_factory=set)


class Proposer:
    """The part of an agent that makes an epoch come about.

    Any voter may propose; one is enough. The voters try in the order of their seniority, each a while after the one
    before, so that two rarely do at once. If they do, the larger ballot wins and nothing is lost but time.

    Args:
        host: the agent.
        outbox: the agent's.
        random: draws the waits after a ballot that failed or gave way.
    """

    def __init__(self, host: _Host, outbox: Outbox, random: Random) -> None:
        self._host, self._outbox, self._random = host, outbox, random
        self._attempt: _Attempt | None = None
        self._highest = 0  # round of any ballot seen in this decision
        self._wanted_since = math.inf
        self._quiet_until, self._quiet_for = -math.inf, ""
        self._failures = 0
        self._blocked = ""
        self._ready = -math.inf  # from when on ranks do not rest before the next ballot

    @property
    def next_tick(self) -> float:
        """When `advance` has something to do."""
        if (attempt := self._attempt) is not None:
            gathers = attempt.value is None and self._host.now < attempt.gather_until
            return attempt.gather_until if gathers else attempt.ends
        return max(self._due, self._ready) if self._wanted_since < math.inf else math.inf

    def reset(self) -> None:
        """The epoch is decided; the next decision begins."""
        self._attempt, self._highest, self._failures, self._blocked = None, 0, 0, ""
        self._wanted_since, self._quiet_until = math.inf, -math.inf
        self._ready = -math.inf

    def advance(self) -> None:
        """Do what is due: begin a ballot, put a value to the vote, or give an attempt up."""
        host, epoch = self._host, self._host.epoch
        if epoch is None or host.name not in epoch.voters:
            return
        if (attempt := self._attempt) is not None:
            self._vote(epoch, attempt)
            if self._attempt is attempt and host.now >= attempt.ends:
                self._give_up(epoch, attempt)
            return
        reason = host.cause()
        if not reason:
            self._wanted_since = math.inf
            return
        self._wanted_since = min(self._wanted_since, host.now)
        if host.now >= self._due:
            self._ready = host.rest()
            if host.now >= self._ready:
                self._begin(epoch, reason)

    def repeat(self) -> None:
        """Ask those again that have not answered."""
        if (attempt := self._attempt) is None or (epoch := self._host.epoch) is None:
            return
        if attempt.value is None:
            self._outbox.broadcast(epoch, Prepare(epoch.number, attempt.ballot), but=tuple(attempt.promises))
        else:
            accept = Accept(epoch.number, attempt.ballot, attempt.value)
            self._outbox.broadcast(epoch, accept, but=tuple(attempt.accepted_by))

    def give_way(self, ballot: Ballot) -> None:
        """Another ballot is under way: leave it the time to end."""
        self._highest = max(self._highest, ballot.round)
        if self._attempt is not None and ballot > self._attempt.ballot:
            self._attempt = None
        if ballot.proposer != self._host.name:
            wait_s = self._host.options.ballot_s
            self._quiet_until = self._host.now + wait_s + self._random.uniform(0, wait_s)
            self._quiet_for = ballot.proposer

    def on_promise(self, sender: str, incarnation: int, promise: Promise) -> None:
        """A member has promised and reported."""
        attempt = self._attempt
        if attempt is not None and attempt.ballot == promise.ballot and attempt.value is None:
            attempt.promises[sender] = Reported(incarnation, promise)

    def on_accepted(self, sender: str, accepted: Accepted) -> None:
        """A member has accepted."""
        attempt = self._attempt
        if attempt is not None and attempt.ballot == accepted.ballot and attempt.value is not None:
            attempt.accepted_by.add(sender)

    def _begin(self, epoch: Epoch, reason: str) -> None:
        host, options = self._host, self._host.options
        promised = host.record.promised
        self._highest = max(self._highest, promised.round if promised is not None else 0) + 1
        ballot = Ballot(self._highest, host.name)
        attempt = _Attempt(ballot, reason, host.now + options.gather_s, host.now + options.ballot_s)
        self._attempt = attempt
        prepare = Prepare(epoch.number, ballot)
        attempt.promises[host.name] = Reported(host.record.incarnation, host.promise(prepare))
        self._outbox.broadcast(epoch, prepare)
        self._vote(epoch, attempt)

    def _vote(self, epoch: Epoch, attempt: _Attempt) -> None:
        host = self._host
        if attempt.value is None:
            if not is_quorum(epoch, attempt.promises.keys()):
                return
            awaited = {m.name for m in epoch.members} - attempt.promises.keys() - host.suspected.keys()
            if awaited and host.now < attempt.gather_until:
                return
            value = value_to_adopt(epoch, attempt.promises)
            if value is None:
                value = compose(epoch, attempt.promises, host.joining, attempt.reason)
            if value is None:
                return
            attempt.value = value
            accept = Accept(epoch.number, attempt.ballot, value)
            host.accept(accept)
            attempt.accepted_by.add(host.name)
            self._outbox.broadcast(epoch, accept)
        if is_quorum(epoch, attempt.accepted_by):
            self._decided(epoch, attempt.value)

    def _decided(self, epoch: Epoch, value: Epoch) -> None:
        host = self._host
        others = {m.address: m.name for m in (*epoch.members, *value.members) if m.name != host.name}
        host.learn(value)
        for address, name in others.items():
            self._outbox.send(address, name, Decided(value))

    def _give_up(self, epoch: Epoch, attempt: _Attempt) -> None:
        host = self._host
        self._attempt = None
        self._failures += 1
        if attempt.value is None and is_quorum(epoch, attempt.promises.keys()):
            reason = "no member that answers has the model"
        else:
            answers = attempt.promises.keys() if attempt.value is None else attempt.accepted_by
            missing = [name for name in epoch.voters if name not in answers]
            reason = f"no majority of epoch {epoch.number}; no answer from {', '.join(missing)}"
        if reason != self._blocked:
            self._blocked = reason
            self._outbox.add(Blocked(reason))
        longest_s = host.options.detect_s * min(2**self._failures, 4)
        self._quiet_until, self._quiet_for = host.now + self._random.uniform(0, longest_s), ""

    @property
    def _due(self) -> float:
        """When to begin a ballot, if another epoch is wanted."""
        quiet = self._quiet_for not in self._host.suspected
        return max(self._wanted_since + self._turn(), self._quiet_until if quiet else -math.inf)

    def _turn(self) -> float:
        """How long this voter leaves the attempt to those before it that it can hear."""
        epoch = self._host.epoch
        if epoch is None or self._host.name not in epoch.voters:
            return math.inf
        before = epoch.voters[: epoch.voters.index(self._host.name)]
        suspected = self._host.suspected
        return sum(name not in suspected for name in before) * self._host.options.beat_s

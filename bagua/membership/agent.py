"""The state machine that each host runs: messages, time and local events in; actions and verdicts out."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bagua.membership.actions import Action, EpochBegan, Excluded, Left, Persist, Send, Slow, Verdict
from bagua.membership.departure import Departure
from bagua.membership.detector import Detector
from bagua.membership.epoch import NO_MODEL, Epoch, Member
from bagua.membership.messages import (
    MAX_ADDRESS,
    MAX_PAYLOAD,
    Accept,
    Accepted,
    Body,
    Decided,
    Envelope,
    Heartbeat,
    Join,
    Prepare,
    Promise,
    Rejected,
    Report,
    Request,
    checked_argument,
    checked_text,
)
from bagua.membership.options import Options
from bagua.membership.pending import Pending
from bagua.membership.progress import Progress
from bagua.membership.proposer import Proposer
from bagua.membership.record import Record

__all__ = ["Agent"]


class Agent:
    """One host's part in the agreement on members. Pure: no clock, threads, sockets or files of its own.

    Every input method takes the time `now` (seconds, any clock that never goes back) and may leave actions; `take`
    returns them, to be carried out in order. Call `tick` at `next_tick` at the latest. Calls must not overlap.

    Args:
        record: who this host is; a recovered one keeps what it had promised.
        options: times.
        now: the clock.
        epoch: what all founders of the job agree on; None for a host that arrives later.
        contacts: addresses to ask for admission.
        payload: see `Member.payload`.
        seed: of the random waits between ballots.

    Raises:
        ValueError: names the argument that exceeds a limit of the messages.

    Example:
        >>> hosts = [Member("a", 0, "10.0.0.1:7000"), Member("b", 0, "10.0.0.2:7000")]
        >>> agent = Agent(Record("job", "a", 0, "10.0.0.1:7000"), Options(), 0.0, epoch=Epoch.first(hosts))
        >>> agent.start_step(1, 0), agent.finish_step(1, 0), agent.held
        (<Verdict.GRANTED: 'granted'>, <Verdict.GRANTED: 'granted'>, 1)
    """

    def __init__(
        self,
        record: Record,
        options: Options,
        now: float,
        *,
        epoch: Epoch | None = None,
        contacts: Sequence[str] = (),
        payload: str = "",
        seed: int = 0,
    ) -> None:
        for contact in contacts:
            checked_argument("contacts", contact, MAX_ADDRESS)
        checked_text(payload, MAX_PAYLOAD)
        self.options, self.payload = options, payload
        self._record, self._contacts = record, tuple(contacts)
        self._random = random.Random(f"{seed}/{record.name}/{record.incarnation}")
        self._now, self._next_beat = now, now
        self._out: list[Action] = []
        self._detector = Detector(options.detect_s, options.max_wait_s, now)
        self._proposer = Proposer(self)
        self._progress = Progress()
        self._pending = Pending()
        self._recovered: set[str] = set()  # members that answer with a later incarnation
        self._departure = Departure()
        if record.epoch is not None:
            self._enter(record.epoch)
            self._progress.fenced = record.promised is not None
        elif epoch is not None:
            self.learn(epoch)
            self._progress.found()

    # What is known

    @property
    def name(self) -> str:
        """Of this agent."""
        return self._record.name

    @property
    def record(self) -> Record:
        """What must not be forgotten while this agent keeps its name."""
        return self._record

    @property
    def epoch(self) -> Epoch | None:
        """The newest epoch that is known here."""
        return self._record.epoch

    @property
    def member(self) -> Member | None:
        """This host in that epoch; None if it is not in it."""
        return None if self.epoch is None else self.epoch.member(self.name, self._record.incarnation)

    @property
    def held(self) -> int:
        """Steps that the weights of this host have completed, or `NO_MODEL`."""
        return self._progress.held

    @property
    def behind(self) -> bool:
        """Whether this host trains, but must fetch weights first: when the groups opened, others had completed more."""
        return self._progress.behind

    @property
    def fenced(self) -> bool:
        """Whether the next epoch is being decided: no step is completed meanwhile, so that reports stay true."""
        return self._progress.fenced

    @property
    def next_tick(self) -> float:
        """When `tick` has something to do, at the latest."""
        return min(self._next_beat, self._proposer.next_tick)

    @property
    def now(self) -> float:
        """The time of the last input."""
        return self._now

    @property
    def suspected(self) -> dict[str, str]:
        """Members that are taken for lost, and why."""
        return {name: self._detector.why(name) for name in self._detector.suspected}

    @property
    def joining(self) -> list[Member]:
        """Hosts that have asked to take part, as learners."""
        return self._pending.joins

    def random_wait(self, upto: float) -> float:
        """Seconds from 0 to `upto`."""
        return self._random.uniform(0, upto)

    def take(self) -> list[Action]:
        """The actions since the last call. A driver carries them out in order."""
        out, self._out = self._out, []
        return out

    # Local events

    def start_step(self, group: int, step: int) -> Verdict:
        """Ask to begin step `step` (0, 1, ...) over the process groups of `group`."""
        return self._progress.start(group, step)

    def finish_step(self, group: int, step: int) -> Verdict:
        """Ask to apply step `step`, whose exchanges over `group` have ended well.

        If granted, it counts, unless the next epoch leaves this host out. Several ranks of a host may ask, one after
        the other: what one of them was granted the others are, too.
        """
        return self._progress.finish(group, step)

    def weights_fetched(self, epoch: int, step: int) -> Verdict:
        """Ask to put in place weights of `step` that a trainer held in `epoch`, fetched beside the old ones.

        They may be older than the present epoch, as long as their steps still count.
        """
        return self._progress.fetch(epoch, step)

    def exchange_failed(self, now: float, group: int) -> None:
        """A connection of `group` has failed: it is to be opened anew, also if no member is lost."""
        if self.epoch is not None and group == self.epoch.group:
            self._progress.broken = group
        self._wake(now)

    def weights_lost(self, now: float, payload: str) -> None:
        """The last rank of this host that had weights has ended. The host keeps its vote until the next epoch."""
        self._progress.held = NO_MODEL
        self.set_payload(now, payload)

    def set_payload(self, now: float, payload: str) -> None:
        """What others need to know has changed: a rank has ended or come. The groups are opened anew."""
        self.payload = checked_text(payload, MAX_PAYLOAD)
        self._wake(now)

    def leave(self, now: float) -> None:
        """Leave the job in order. Train on until `Excluded`, and serve this agent until `Left`: its vote may be needed
        until the others know that they are a quorum without it.

        The last host that has the weights stays until another has fetched them. At the end of a job nobody leaves.
        """
        self._departure.begun = True
        self._wake(now)

    def closed(self, now: float, name: str) -> None:
        """The connection to the agent `name` was closed by its end."""
        self._detector.closed(name)
        self._wake(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._now = max(self._now, now)
        me = self.member
        waits = self._progress.started if me is not None and me.trains and not self.behind else None
        self._out += [Slow(name, waited) for name, waited in self._detector.tick(self._now, waits, self.fenced)]
        self._pending.expire(self._now)
        if self._now >= self._next_beat:
            self._next_beat = self._now + self.options.beat_s
            self._beat()
        self._proposer.advance()

    # Messages

    def receive(self, now: float, envelope: Envelope) -> None:
        """A message has come. Those of another job, for somebody else or of a past incarnation are ignored."""
        body, sender = envelope.body, envelope.sender
        if envelope.job != self._record.job or envelope.receiver not in ("", self.name) or sender == self.name:
            return
        if (known := self._incarnation(sender)) is not None and envelope.incarnation < known:
            return
        self._now = max(self._now, now)
        self._detector.heard(sender, body.started if isinstance(body, Heartbeat) else None)
        listed = None if self.epoch is None else self.epoch.by_name.get(sender)
        if listed is not None and envelope.incarnation > listed.incarnation:
            self._recovered.add(sender)
        if isinstance(body, Join):
            self._note_join(envelope, body)
        if isinstance(body, Decided):
            self.learn(body.value)
            if self._has_left and body.value == self.epoch and self._departure.confirm(body.value, sender):
                self._out.append(Left(body.value))
        elif self.epoch is not None and body.epoch < self.epoch.number:
            self.send(envelope.address, sender, Decided(self.epoch))
        elif self.epoch is None or body.epoch > self.epoch.number:
            self.send(envelope.address, sender, Heartbeat(self._number, 0))  # the answer is the newer epoch
        elif self.epoch.by_name.get(self.name) is not None and listed is not None:
            self._in_epoch(envelope, body)
        elif isinstance(body, Heartbeat) and listed is None:
            self.send(envelope.address, sender, Decided(self.epoch))  # to one that leaves
        self._proposer.advance()

    def _in_epoch(self, envelope: Envelope, body: Body) -> None:
        """A message of a member about the decision that is next."""
        if isinstance(body, Request):
            self._pending.ask(envelope.sender, body.reason, self._now + self.options.join_s)
        elif isinstance(body, Accept) and body.value.number != body.epoch + 1:
            return
        elif isinstance(body, Prepare | Accept):
            if self._record.promised is not None and body.ballot < self._record.promised:
                self.send(envelope.address, envelope.sender, Rejected(body.epoch, self._record.promised))
            else:
                answer = self.promise(body) if isinstance(body, Prepare) else self.accept(body)
                self.send(envelope.address, envelope.sender, answer)
                self._proposer.give_way(body.ballot)
        elif isinstance(body, Promise):
            self._proposer.on_promise(envelope.sender, envelope.incarnation, body)
        elif isinstance(body, Accepted):
            self._proposer.on_accepted(envelope.sender, body)
        elif isinstance(body, Rejected):
            self._proposer.give_way(body.promised)

    def promise(self, prepare: Prepare) -> Promise:
        """Promise, durably, and report."""
        self._progress.fenced = True
        self._keep(self._record.promise(prepare.ballot))
        kept = self._record
        return Promise(prepare.epoch, prepare.ballot, self._report(), kept.accepted_ballot, kept.accepted)

    def accept(self, accept: Accept) -> Accepted:
        """Accept a value, durably."""
        self._progress.fenced = True
        self._keep(self._record.accept(accept.ballot, accept.value))
        return Accepted(accept.epoch, accept.ballot)

    def learn(self, epoch: Epoch) -> None:
        """An epoch was decided: all that was promised for it is settled."""
        previous, was = self.epoch, self.member
        if previous is not None and epoch.number <= previous.number:
            return
        self._keep(self._record.decide(epoch))
        self._enter(epoch)
        if self.member is not None:
            self._out.append(EpochBegan(epoch, previous))
        elif was is not None:
            self._out.append(Excluded(epoch))

    def _enter(self, epoch: Epoch) -> None:
        """Begin anew what belongs to one epoch."""
        self._proposer.reset()
        self._recovered.clear()
        self._departure.confirmed.clear()
        self._pending.settle(epoch)
        others = [m for m in epoch.members if m.name != self.name]
        self._detector.watch({m.name: m.trains for m in others})
        self._progress.adopt(epoch, self.member)
        self._next_beat = self._now

    # What is sent

    def send(self, address: str, receiver: str, body: Body) -> None:
        """Put a message among the actions."""
        me = self._record
        self._out.append(Send(address, Envelope(me.job, me.name, me.incarnation, me.address, receiver, body)))

    def broadcast(self, body: Body, but: Sequence[str] = ()) -> None:
        """Send a message to all other members of the epoch."""
        for member in self.epoch.members if self.epoch is not None else ():
            if member.name != self.name and member.name not in but:
                self.send(member.address, member.name, body)

    def emit(self, action: Action) -> None:
        """Add an action."""
        self._out.append(action)

    def cause(self) -> str:
        """Why this host wants another epoch, in words; empty if it does not."""
        own = self._own_cause()
        if own or self.epoch is None or self.name not in self.epoch.voters:
            return own
        if self.joining:
            return f"{', '.join(sorted(m.name for m in self.joining))} joins"[:MAX_PAYLOAD]
        return self._pending.request or ("a ballot was begun" if self.fenced else "")

    @property
    def _has_left(self) -> bool:
        return self._departure.begun and self.epoch is not None and self.name not in self.epoch.by_name

    @property
    def _number(self) -> int:
        return 0 if self.epoch is None else self.epoch.number

    def _own_cause(self) -> str:
        epoch, me = self.epoch, self.member
        if epoch is None or epoch.by_name.get(self.name) is None:
            return ""
        if lost := self.suspected:
            return "; ".join(f"{name} is lost: {why}" for name, why in sorted(lost.items()))[:MAX_PAYLOAD]
        if self._recovered:
            return f"{', '.join(sorted(self._recovered))} restarted"[:MAX_PAYLOAD]
        if me is None:
            return f"{self.name} restarted"
        if self._departure.begun and any(m.trains and m.name != self.name for m in epoch.members):
            return f"{self.name} leaves"
        if me.trains and self._progress.broken == epoch.group:
            return f"{self.name} lost a connection of its group"
        if me.payload != self.payload or (me.trains and self.held == NO_MODEL):
            return f"{self.name} lost or gained ranks"
        if self.held != NO_MODEL and not self.behind and (not me.trains or not me.votes):
            return f"{self.name} has the weights"
        return ""

    def _report(self) -> Report:
        members, group = ((), -1) if self.epoch is None else (self.epoch.members, self.epoch.group)
        unheard = tuple(place for place, member in enumerate(members) if self._detector.why(member.name))
        return Report(self.held, self.payload, self._progress.broken == group, self._departure.begun, unheard)

    def _beat(self) -> None:
        epoch = self.epoch
        if epoch is not None and self.name in epoch.by_name:
            self.broadcast(Heartbeat(epoch.number, self._progress.started))
            if reason := self._own_cause():
                self.broadcast(Request(epoch.number, reason))
        if self._has_left and epoch is not None:
            self.broadcast(Heartbeat(epoch.number, 0), but=tuple(self._departure.confirmed))
        elif self.member is None:
            members = {m.address: m.name for m in epoch.members if m.name != self.name} if epoch is not None else {}
            for address in (*members, *(c for c in self._contacts if c not in members)):
                if address != self._record.address:
                    self.send(address, members.get(address, ""), Join(self._number, self.payload))
        self._proposer.repeat()

    def _note_join(self, envelope: Envelope, join: Join) -> None:
        if self.epoch is None or self.epoch.member(envelope.sender, envelope.incarnation) is not None:
            return
        member = Member(envelope.sender, envelope.incarnation, envelope.address, join.payload)
        self._pending.join(member, self._now + self.options.join_s)

    def _incarnation(self, name: str) -> int | None:
        listed = self.epoch.by_name.get(name) if self.epoch is not None else None
        found = (listed.incarnation if listed is not None else None, self._pending.incarnation(name))
        return max((each for each in found if each is not None), default=None)

    def _keep(self, record: Record) -> None:
        if record != self._record:
            self._record = record
            self._out.append(Persist(record.to_bytes()))

    def _wake(self, now: float) -> None:
        """Tell the voters at once that the epoch should change, not only with the next heartbeat."""
        self._now = max(self._now, now)
        self._next_beat = self._now
        self._proposer.advance()

"""The state machine that each host runs: messages, time and local events in; actions and verdicts out."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from bagua.membership.acceptor import Acceptor
from bagua.membership.actions import Action, EpochBegan, Excluded, Left, Verdict
from bagua.membership.causes import Causes
from bagua.membership.departure import Departure
from bagua.membership.detector import place
from bagua.membership.encoding import checked_argument, checked_text
from bagua.membership.epoch import Epoch, Member
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
    Rest,
    Resting,
)
from bagua.membership.options import Options
from bagua.membership.outbox import Outbox
from bagua.membership.pause import Pause
from bagua.membership.peers import Peers
from bagua.membership.proposer import Proposer
from bagua.membership.record import Record
from bagua.membership.seats import Seats

__all__ = ["Agent"]


class Agent:
    """One host's part in the agreement on members. Pure: no clock, threads, sockets or files of its own.

    Every input method takes the time `now` (seconds, any clock that never goes back) and may leave actions; `take`
    returns them, to be carried out in order. Call `tick` at `next_tick` at the latest. Calls must not overlap.

    Attributes:
        seats: the ranks of this host.

    Args:
        record: who this host is; a recovered one keeps what it had promised.
        options: times.
        now: the clock.
        epoch: what all founders of the job agree on; None for a host that arrives later.
        contacts: addresses to ask for admission.
        payload: see `Member.payload`.
        seed: of the random waits between ballots.
        seats: numbers of the ranks that this host begins with, see `Member.seats`.

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
        seats: Sequence[int] = (0,),
    ) -> None:
        for contact in contacts:
            checked_argument("contacts", contact, MAX_ADDRESS)
        checked_text(payload, MAX_PAYLOAD)
        self.options, self.payload = options, payload
        self._contacts = tuple(contacts)
        self._now, self._next_beat = now, now
        self._outbox = Outbox(record)
        self._acceptor = Acceptor(record, self._outbox)
        self._peers = Peers(record.name, options, now)
        self._proposer = Proposer(self, self._outbox, random.Random(f"{seed}/{record.name}/{record.incarnation}"))
        self.seats = Seats(seats)
        self._early: Envelope | None = None
        self._departure, self._pause = Departure(), Pause()
        self._causes = Causes(self, self._peers, self._departure)
        if record.epoch is not None:
            self._enter(record.epoch)
            self.seats.fenced = record.promised is not None
        elif epoch is not None:
            self.learn(epoch)
            self.seats.found()

    # What is known

    @property
    def name(self) -> str:
        """Of this agent."""
        return self.record.name

    @property
    def record(self) -> Record:
        """What must not be forgotten while this agent keeps its name."""
        return self._acceptor.record

    @property
    def epoch(self) -> Epoch | None:
        """The newest epoch that is known here."""
        return self.record.epoch

    @property
    def member(self) -> Member | None:
        """This host in that epoch; None if it is not in it."""
        return None if self.epoch is None else self.epoch.member(self.name, self.record.incarnation)

    @property
    def held(self) -> int:
        """Steps that the weights of this host have completed, or `NO_MODEL`; of the rank that is furthest."""
        return self.seats.held

    @property
    def behind(self) -> bool:
        """Whether this host trains, but must fetch weights first: when the groups opened, others had completed more."""
        return self.seats.behind

    @property
    def fenced(self) -> bool:
        """Whether the next epoch is being decided: no step is completed meanwhile, so that reports stay true."""
        return self.seats.fenced

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
        return self._peers.suspected

    @property
    def joining(self) -> list[Member]:
        """Hosts that have asked to take part, as learners."""
        return self._peers.joining

    def take(self) -> list[Action]:
        """The actions since the last call. A driver carries them out in order."""
        return self._outbox.take()

    # Local events

    def start_step(self, group: int, step: int, seat: int = 0, now: float = 0.0) -> Verdict:
        """Ask to begin step `step` (0, 1, ...) over the process groups of `group`, for one rank of this host."""
        self._now = max(self._now, now)
        if (progress := self.seats.progress(seat)) is None:
            return Verdict.DENIED
        if self._pause.after is not None and progress.start(group, step, ask=True) is Verdict.GRANTED:
            # One that begins it once more trains apart from the others now: an epoch costs it nothing at this point.
            again = progress.begun > step
            holds = not again and self._pause.holds(self._now, step)
            if (holds or again) and self._pause.add(self._now, seat, self.seats.training):
                self._rests()
            if holds:
                return Verdict.WAIT
        return progress.start(group, step)

    def arrived(self, now: float, group: int, step: int, seat: int = 0) -> None:
        """This rank has given its part to the exchange of step `step`, and begins to wait for those of the others."""
        if (progress := self.seats.progress(seat)) is not None:
            progress.arrive(group, step)
        self._now = max(self._now, now)
        self._watch()

    def finish_step(self, group: int, step: int, seat: int = 0) -> Verdict:
        """Ask to apply step `step`, whose exchanges over `group` have ended well on this rank.

        If granted, it counts, unless the next epoch leaves this host out.
        """
        progress = self.seats.progress(seat)
        return Verdict.DENIED if progress is None else progress.finish(group, step)

    def weights_fetched(self, epoch: int, step: int, seat: int = 0) -> Verdict:
        """Ask to put in place weights of `step` that a trainer held in `epoch`, fetched beside the old ones.

        They may be older than the present epoch, as long as their steps still count. A host that has none waits with
        its first weights for those of its ranks that were started and have not come yet, 10 s at most.
        """
        verdict = self.seats.fetched(seat, epoch, step, self._now)
        if verdict is Verdict.GRANTED:
            self._next_beat = self._now  # ask at once to train with the others
        return verdict

    def exchange_failed(self, now: float, group: int) -> None:
        """A connection of `group` has failed: it is to be opened anew, also if no member is lost."""
        self.seats.fail(group)
        self._wake(now)

    def rank_started(self, seat: int) -> None:
        """A rank of this host was started, and has no weights yet.

        Raises:
            ValueError: the host has a rank of that number, or too many.
        """
        self.seats.add(seat)

    def rank_wants_weights(self, now: float, seat: int) -> None:
        """It waits for the weights. Of a host without any, one rank fetches them; the others get them as they train."""
        self.seats.ready(seat, now)
        self._wake(now)

    def rank_over(self, seat: int) -> None:
        """It has trained to the end. It stays a member until groups are opened anew."""
        self.seats.over(seat)

    def rank_ended(self, now: float, seat: int) -> None:
        """A rank is lost, and its weights. The others train on; without any the host votes until the next epoch."""
        self.seats.remove(seat)
        self._wake(now)

    def learns(self, seat: int) -> bool:
        """Whether this rank is to fetch the weights beside training, for all ranks of its host."""
        return self.seats.learns(seat)

    def leave(self, now: float) -> None:
        """Leave the job in order. Train on until `Excluded`, and serve this agent until `Left`: its vote may be needed
        until the others know that they are a quorum without it.

        The last host that has the weights stays until another has fetched them. At the end of a job nobody leaves.
        """
        self._departure.begun = True
        self._wake(now)

    def closed(self, now: float, name: str) -> None:
        """The connection to the agent `name` was closed by its end."""
        self._peers.closed(name)
        self._wake(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._now = max(self._now, now)
        self._watch()
        if self._now >= self._next_beat:
            self._next_beat = self._now + self.options.beat_s
            self._beat()
        self._proposer.advance()

    # Messages

    def receive(self, now: float, envelope: Envelope) -> None:
        """A message has come. Those of another job, for somebody else or of a past incarnation are ignored."""
        body, sender = envelope.body, envelope.sender
        if envelope.job != self.record.job or envelope.receiver not in ("", self.name) or sender == self.name:
            return
        if self._peers.is_outdated(envelope):
            return
        self._now = max(self._now, now)
        self._peers.hear(self._now, envelope)
        listed = None if self.epoch is None else self.epoch.by_name.get(sender)
        if isinstance(body, Decided):
            self.learn(body.value)
            self._take_early()
            if self._has_left and body.value == self.epoch and self._departure.confirm(body.value, sender):
                self._outbox.add(Left(body.value))
        elif self.epoch is not None and body.epoch < self.epoch.number:
            self._outbox.answer(envelope, Decided(self.epoch))
        elif self.epoch is None or body.epoch > self.epoch.number:
            if isinstance(body, Prepare | Accept):
                self._early = envelope
            self._outbox.answer(envelope, Heartbeat(self._number, 0))  # the answer is the newer epoch
        elif self.epoch.by_name.get(self.name) is not None and listed is not None:
            self._in_epoch(envelope, body)
        elif isinstance(body, Heartbeat) and listed is None:
            self._outbox.answer(envelope, Decided(self.epoch))  # to one that leaves
        self._proposer.advance()

    def _take_early(self) -> None:
        """The newest vote of what was a later epoch: its proposer would else wait for a heartbeat."""
        early, epoch = self._early, self.epoch
        if early is None or epoch is None or isinstance(early.body, Decided) or early.body.epoch > epoch.number:
            return
        self._early = None
        if self._peers.is_outdated(early):
            return
        if early.body.epoch == epoch.number and self.name in epoch.by_name and early.sender in epoch.by_name:
            self._in_epoch(early, early.body)

    def _in_epoch(self, envelope: Envelope, body: Body) -> None:
        """A message of a member about the decision that is next."""
        if isinstance(body, Request):
            self._peers.ask(self._now, envelope.sender, body.reason, body.can_wait)
        elif isinstance(body, Rest):
            self._pause.ask(self._now, envelope.sender, body.after)
        elif isinstance(body, Resting):
            self._pause.hosts.add(envelope.sender)
        elif isinstance(body, Accept) and body.value.number != body.epoch + 1:
            return
        elif isinstance(body, Prepare | Accept):
            if refusal := self._acceptor.refusal(body):
                self._outbox.answer(envelope, refusal)
            else:
                self._outbox.answer(envelope, self.promise(body) if isinstance(body, Prepare) else self.accept(body))
                self._proposer.give_way(body.ballot)
        elif isinstance(body, Promise):
            self._proposer.on_promise(envelope.sender, envelope.incarnation, body)
        elif isinstance(body, Accepted):
            self._proposer.on_accepted(envelope.sender, body)
        elif isinstance(body, Rejected):
            self._proposer.give_way(body.promised)

    def promise(self, prepare: Prepare) -> Promise:
        """Promise, durably, and report."""
        self.seats.fenced = True
        return self._acceptor.promise(prepare, self._report())

    def accept(self, accept: Accept) -> Accepted:
        """Accept a value, durably."""
        self.seats.fenced = True
        return self._acceptor.accept(accept)

    def learn(self, epoch: Epoch) -> None:
        """An epoch was decided: all that was promised for it is settled."""
        previous, was = self.epoch, self.member
        if previous is not None and epoch.number <= previous.number:
            return
        self._acceptor.decide(epoch)
        self._enter(epoch)
        if self.member is not None:
            self._outbox.add(EpochBegan(epoch, previous))
        elif was is not None:
            self._outbox.add(Excluded(epoch))

    def _enter(self, epoch: Epoch) -> None:
        """Begin anew what belongs to one epoch."""
        self._proposer.reset()
        self._departure.confirmed.clear()
        self._pause = Pause()
        self._peers.adopt(epoch)
        self.seats.adopt(epoch, self.member)
        self._next_beat = self._now

    # Why another epoch is wanted, and what is sent with each heartbeat

    def cause(self) -> str:
        """Why this host wants another epoch, in words; empty if it does not."""
        own = self._causes.own(self._now)
        if own or self.epoch is None or self.name not in self.epoch.voters:
            return own
        if self.joining:
            return f"{', '.join(sorted(m.name for m in self.joining))} joins"[:MAX_PAYLOAD]
        return self._peers.request or ("a ballot was begun" if self.fenced else "")

    @property
    def _has_left(self) -> bool:
        return self._departure.begun and self.epoch is not None and self.name not in self.epoch.by_name

    @property
    def _number(self) -> int:
        return 0 if self.epoch is None else self.epoch.number

    def rest(self) -> float:
        """From when on a ballot may begin here. If no loss calls for it, ranks are asked to end their step first."""
        epoch, can_wait = self.epoch, self._peers.can_wait or bool(self._causes.readiness(self._now))
        if epoch is None or self.fenced or self._causes.change(self._now) or self.behind or not can_wait:
            return -math.inf
        if self._pause.after is None:
            after = self.seats.started + 1  # no member can have begun more
            self._pause.ask(self._now, self.name, after)
            self._outbox.broadcast(epoch, Rest(epoch.number, after))
        return self._pause.ready(self.name, {m.name for m in epoch.trainers} - self.suspected.keys())

    def _rests(self) -> None:
        """All ranks of this host rest."""
        self._pause.hosts.add(self.name)
        asker = None if self.epoch is None else self.epoch.by_name.get(self._pause.asker)
        if asker is not None and asker.name != self.name:
            self._outbox.send(asker.address, asker.name, Resting(self._number))
        self._proposer.advance()

    def _report(self) -> Report:
        seats, unheard = self.seats.listed(self._now), self._peers.unheard
        return Report(self.held, self.payload, self.seats.broken, self._departure.begun, unheard, seats)

    def _watch(self) -> None:
        mine = place(self.seats.started, self.seats.arrived) if self.seats.waits else None
        for slow in self._peers.tick(self._now, mine, self.fenced):
            self._outbox.add(slow)

    def _beat(self) -> None:
        epoch = self.epoch
        if epoch is not None and self.name in epoch.by_name:
            self._outbox.broadcast(epoch, Heartbeat(epoch.number, self.seats.started, self.seats.arrived))
            if reason := self._causes.own(self._now):
                self._outbox.broadcast(epoch, Request(epoch.number, reason, not self._causes.change(self._now)))
        if self._has_left and epoch is not None:
            self._outbox.broadcast(epoch, Heartbeat(epoch.number, 0), but=tuple(self._departure.confirmed))
        elif self.member is None:
            members = {m.address: m.name for m in epoch.members if m.name != self.name} if epoch is not None else {}
            for address in (*members, *(c for c in self._contacts if c not in members)):
                if address != self.record.address:
                    self._outbox.send(address, members.get(address, ""), Join(self._number, self.payload))
        self._proposer.repeat()

    def _wake(self, now: float) -> None:
        """Tell the voters at once that the epoch should change, not only with the next heartbeat."""
        self._now = max(self._now, now)
        self._next_beat = self._now
        self._proposer.advance()

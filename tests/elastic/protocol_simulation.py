"""A deterministic simulation of hosts that run `bagua.membership.Agent` and train, on a network that fails.

One seed is one run: message delays, losses, repetitions and reordering; hosts killed between any two actions, restarted
with or without their record, stopped and resumed; partitions, one-way ones too; hosts that join and leave. Every
message passes through its encoding. The invariants are checked as the run goes, and a violation prints the end of its
trace.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bagua.membership import (
    Action,
    Agent,
    Blocked,
    Epoch,
    EpochBegan,
    Excluded,
    Left,
    Member,
    Options,
    Persist,
    Record,
    Send,
    Verdict,
    decode,
    encode,
)
from bagua.membership.epoch import NO_MODEL, is_quorum
from bagua.membership.messages import MAX_FRAME, Accepted
from bagua.membership.record import MAX_RECORD

FAULTS_END_S = 8.0
LIMIT_S = 60.0
OPTIONS = Options(detect_s=1.0)
EXCHANGE_S = 3.0  # until an engine gives up an exchange that does not end
Log = tuple[Any, ...]  # ("initial" or the host's own weights, then one entry per step)


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Host:
    """A machine: an address, at most one running agent, perhaps a record on its disk."""

    address: str
    agent: Agent | None = None
    record: bytes | None = None
    durable: bool = False
    starts: int = 0
    stopped_until: float = 0.0
    log: Log = ()
    group: int = -1
    inbox: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)  # contributions by (group, step)
    ended: tuple[int, int] | None = None  # an exchange that has ended and waits for the verdict
    wanted: int = -1  # epoch for which weights are being fetched
    leaving: bool = False
    checked: Epoch | None = None

    @property
    def up(self) -> bool:
        return self.agent is not None


class Cluster:
    """One run.

    Args:
        seed: decides everything.
        faults: False for a quiet run.
        ambush: chance of a fault at each of the worst moments; drawn from the seed if None.
    """

    def __init__(self, seed: int, *, faults: bool = True, ambush: float | None = None) -> None:
        self.random = random.Random(seed)
        self.seed, self.now, self.faulty = seed, 0.0, faults
        self.events: list[tuple[float, int, Callable[[], None], str]] = []
        self.count = 0
        self.trace: deque[str] = deque(maxlen=60)
        self.cut: set[tuple[str, str]] = set()  # one-way links that are down
        self.decided: dict[int, Epoch] = {}
        self.known: dict[str, int] = {}  # the newest epoch that each host has learned
        self.struck: set[int] = set()  # epochs whose first host to know of was cut off, or could have been
        self.bases: dict[int, Log] = {}  # group -> the weights that it began with
        self.steps: dict[tuple[int, int], tuple[str, ...]] = {}  # (group, step) -> what was averaged
        self.superseded: dict[int, int] = {}  # group -> the step at which it ended
        self.ambush = self.random.choice((0.0, 0.1, 0.3)) if faults else 0.0
        self.ambush = self.ambush if ambush is None else ambush
        self.names: dict[str, Host] = {}
        self.loss = self.random.choice((0.0, 0.02, 0.1, 0.3)) if faults else 0.0
        self.slowest_s = self.random.choice((0.01, 0.05, 0.3)) if faults else 0.01
        size = self.random.randint(2, 5)
        self.hosts = [Host(f"h{i}", durable=self.random.random() < 0.5) for i in range(size + 2)]
        founders = [Member(f"h{i}.0", 0, f"h{i}") for i in range(size)]
        self.first = Epoch.first(founders, tie_break=self.random.random() < 0.25)
        self.names.update({member.name: host for host, member in zip(self.hosts, founders, strict=False)})
        for host, member in zip(self.hosts, founders, strict=False):
            host.starts = 1
            host.log = ("initial",)
            self._boot(host, Record("job", member.name, 0, host.address), self.first)
        if faults:
            self._plan_faults(size)

    # Faults

    def _plan_faults(self, size: int) -> None:
        for late in self.hosts[size:]:
            if self.random.random() < 0.6:
                self.at(self.random.uniform(0, FAULTS_END_S), lambda h=late: self._start(h), f"start {late.address}")
        for _ in range(self.random.randint(1, 5)):
            when, host = self.random.uniform(0.0, FAULTS_END_S), self.random.choice(self.hosts)
            kind = self.random.choice(
                ("kill", "kill", "kill", "stop", "partition", "one-way", "mute", "leave", "ranks", "link")
            )
            self.at(when, lambda k=kind, h=host: self._fault(k, h), f"{kind} {host.address}")

    def _fault(self, kind: str, host: Host) -> None:
        lasts = self.random.uniform(0.1, 5.0)
        if kind == "kill":
            self.kill(host, told=self.random.random() < 0.7)
            if self.random.random() < 0.7:
                self.at(self.now + lasts, lambda: self._start(host), f"start {host.address}")
        elif kind == "stop":
            host.stopped_until = self.now + lasts
        elif kind in ("partition", "one-way"):
            side = set(
                self.random.sample([h.address for h in self.hosts], self.random.randint(1, len(self.hosts) // 2))
            )
            links = {(a.address, b.address) for a in self.hosts for b in self.hosts
                     if a.address in side and b.address not in side}  # fmt: skip
            if kind == "partition":
                links |= {(b, a) for a, b in links}
            elif self.random.random() < 0.5:
                links = {link for link in sorted(links) if self.random.random() < 0.5}
            self.sever(links, lasts)
        elif kind == "mute":  # those that train with it do not hear it; those that fetch its weights do
            trains = [h.address for h in self.hosts if h.agent and h.agent.member and h.agent.member.trains]
            self.sever({(host.address, other) for other in trains if other != host.address}, lasts)
        elif kind == "leave" and host.agent is not None and sum(h.up and not h.leaving for h in self.hosts) > 2:
            host.leaving = True
            self.act(host, lambda agent: agent.leave(self.now))
        elif kind == "ranks" and host.agent is not None:  # the host's ranks are killed and started again
            self.act(host, lambda agent: self._lose_ranks(host, agent))
        elif kind == "link" and host.agent is not None:
            self.act(host, lambda agent: agent.exchange_failed(self.now, host.group))

    def _lose_ranks(self, host: Host, agent: Agent) -> None:
        host.log, host.group, host.ended, host.wanted = (f"fresh {agent.name}",), -1, None, -1
        agent.weights_lost(self.now, f"again at {self.now:.3f}")

    def sever(self, links: set[tuple[str, str]], lasts: float) -> None:
        """Cut one-way links for a while."""
        self.cut |= links
        self.note(f"cut {' '.join(f'{a}>{b}' for a, b in sorted(links))}")
        self.at(self.now + lasts, lambda: self.cut.difference_update(links), "heal")

    def ambushed(self, host: Host, action: Action) -> bool:
        """Strike where it hurts most: who has decided is cut off before it tells; who has accepted is restarted."""
        if self.now > FAULTS_END_S or not self.ambush or self.random.random() >= self.ambush:
            return False
        others = [h.address for h in self.hosts if h is not host]
        if isinstance(action, EpochBegan) and action.epoch.number not in self.struck:
            self.struck.add(action.epoch.number)
            self.sever({(host.address, other) for other in others}, self.random.uniform(0.5, 5.0))
        elif isinstance(action, Send) and isinstance(action.envelope.body, Accepted):
            self.kill(host, told=False)
            self.at(self.now + self.random.uniform(0.0, 1.0), lambda: self._start(host), "")
            return True
        return False

    def kill(self, host: Host, told: bool) -> None:
        """The host loses all but its record. Others are told, or notice by its silence."""
        if (agent := host.agent) is None:
            return
        self.note(f"kill {agent.name}")
        host.agent, host.log, host.inbox, host.ended, host.wanted, host.group = None, (), {}, None, -1, -1
        for other in self.hosts if told else ():
            if other is not host and self.linked(host, other):
                self.at(
                    self.now + self.delay(), lambda o=other: self.act(o, lambda a: a.closed(self.now, agent.name)), ""
                )

    def _start(self, host: Host) -> None:
        if host.agent is not None or host.leaving:
            return
        self.note(f"start {host.address}{' with its record' if host.record is not None else ''}")
        if host.record is not None:
            record = Record.recover(host.record)
        else:
            record = Record("job", f"{host.address}.{host.starts}", 0, host.address)
            host.starts += 1
        host.stopped_until = 0.0
        host.log = (f"fresh {record.name}.{record.incarnation}",)
        self._boot(host, record, None)

    def _boot(self, host: Host, record: Record, epoch: Epoch | None) -> None:
        contacts = [h.address for h in self.hosts]
        host.agent = Agent(record, OPTIONS, self.now, epoch=epoch, contacts=contacts, seed=self.seed)
        self.names[record.name] = host
        self.act(host, lambda agent: agent.tick(self.now))

    # Time and network

    def at(self, when: float, what: Callable[[], None], text: str) -> None:
        """Do something later."""
        self.count += 1
        heapq.heappush(self.events, (when, self.count, what, text))

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now:8.3f} {text}")

    def delay(self) -> float:
        return self.random.uniform(0.001, self.slowest_s)

    def linked(self, a: Host, b: Host) -> bool:
        return (a.address, b.address) not in self.cut

    def run(self, until: float) -> None:
        """Run all events up to a time."""
        while self.events and self.events[0][0] <= until:
            self.now, _, what, text = heapq.heappop(self.events)
            if text:
                self.note(text)
            what()
        self.now = until

    def act(self, host: Host, what: Callable[[Agent], None]) -> None:
        """Give an agent an input, and carry out what it asks for. The host may be killed between two actions."""
        agent = host.agent
        if agent is None:
            return
        if self.now < host.stopped_until:
            self.at(host.stopped_until + self.random.uniform(0, 0.01), lambda: self.act_on(host, agent, what), "")
            return
        self.act_on(host, agent, what)

    def act_on(self, host: Host, agent: Agent, what: Callable[[Agent], None]) -> None:
        if host.agent is not agent:
            return
        what(agent)
        actions = agent.take()
        if (epoch := agent.epoch) is not None and epoch is not host.checked:
            host.checked = epoch
            self.known[agent.name] = epoch.number
            self.check_decision(agent, epoch)
        dies = self.faulty and self.now < FAULTS_END_S and actions and self.random.random() < 0.0005
        for action in actions[: self.random.randint(0, len(actions)) if dies else None]:
            struck = self.ambushed(host, action)
            self.carry_out(host, agent, action)
            if struck:
                break
        if dies and host.agent is agent:
            self.kill(host, told=True)
            self.at(self.now + self.random.uniform(0.1, 3.0), lambda: self._start(host), "")
        elif host.agent is agent:
            self._schedule_tick(host, agent)

    def _schedule_tick(self, host: Host, agent: Agent) -> None:
        due = max(agent.next_tick, self.now + 0.002)
        if due < getattr(agent, "due", float("inf")):
            agent.due = due  # type: ignore[attr-defined]
            self.at(due, lambda: self._tick(host, agent, due), "")

    def _tick(self, host: Host, agent: Agent, due: float) -> None:
        if getattr(agent, "due", None) == due:
            agent.due = float("inf")  # type: ignore[attr-defined]
            self.act(host, lambda a: a.tick(self.now))

    def carry_out(self, host: Host, agent: Agent, action: Action) -> None:
        if isinstance(action, Persist):
            if host.durable:
                host.record = action.record
        elif isinstance(action, Send):
            self._send(host, action)
        elif isinstance(action, EpochBegan):
            self.note(f"{agent.name}@{agent.held} begins {describe(action.epoch)}")
            self.enter(host, action.epoch)
        elif isinstance(action, Excluded):
            self.note(f"{agent.name} is excluded by {describe(action.epoch)}")
            host.group, host.ended, host.wanted, host.log = -1, None, -1, (f"fresh {agent.name}, excluded",)
        elif isinstance(action, Left):
            self.check_left(host, action.epoch)
            self.kill(host, told=False)
        elif isinstance(action, Blocked):
            self.note(f"{agent.name} is blocked: {action.reason}")

    def _send(self, host: Host, send: Send) -> None:
        frame = encode(send.envelope)
        if len(frame) > MAX_FRAME:
            raise Violation(f"a frame of {len(frame)} bytes")
        target = next(h for h in self.hosts if h.address == send.address)
        copies = 0 if self.random.random() < self.loss else 2 if self.loss and self.random.random() < 0.05 else 1
        for _ in range(copies):
            self.at(self.now + self.delay(), lambda: self._deliver(host, target, frame), "")

    def _deliver(self, source: Host, target: Host, frame: bytes) -> None:
        if self.linked(source, target) and target.agent is not None:
            envelope = decode(frame)
            self.act(target, lambda agent: agent.receive(self.now, envelope))

    # Training: each host is one rank, and a step is an all-gather of contributions

    def enter(self, host: Host, epoch: Epoch) -> None:
        """What the engine does when an epoch begins."""
        agent = host.agent
        assert agent is not None
        me = agent.member
        assert me is not None
        self.check_lineage(host, epoch, me)
        if epoch.group != host.group:
            host.group, host.ended, host.wanted = epoch.group, None, -1
            host.inbox = {key: value for key, value in host.inbox.items() if key[0] >= epoch.group}
        if not me.trains or agent.behind:
            self.fetch(host)
        elif host.ended is not None:
            self.finish(host)
        else:
            self.begin(host)

    def begin(self, host: Host) -> None:
        """Begin the next step: send a contribution to all trainers."""
        agent = host.agent
        if agent is None or agent.epoch is None or host.ended is not None:
            return
        group, step = host.group, agent.held
        if agent.start_step(group, step) is not Verdict.GRANTED:
            return
        if not host.log or host.log[0] != "initial":
            raise Violation(f"{agent.name} trains weights that are not the job's: {host.log[:1]}")
        self.check_step(agent, group, step, host.log)
        mine = f"{agent.name}:{step}"
        for member in agent.epoch.trainers:
            self._contribute(host, self.names[member.name], group, step, agent.name, mine)
        self.at(self.now + EXCHANGE_S, lambda: self._timeout(host, agent, group, step), "")

    def _contribute(self, host: Host, target: Host, group: int, step: int, name: str, value: str) -> None:
        def arrive() -> None:
            if not self.linked(host, target):  # TCP sends again until the link heals, or the exchange is given up
                if self.random.random() < 0.7:
                    self.at(self.now + 0.2, arrive, "")
                return
            if target.agent is not None and group >= target.group:
                target.inbox.setdefault((group, step), {})[name] = value
                self.act(target, lambda _: self.complete(target))

        self.at(self.now + (0.0 if host is target else self.delay()), arrive, "")

    def complete(self, host: Host) -> None:
        """The exchange ends when the contributions of all trainers are there."""
        agent = host.agent
        if agent is None or agent.epoch is None or agent.epoch.group != host.group or agent.behind:
            return
        key = (host.group, agent.held)
        got = host.inbox.get(key, {})
        if host.ended is None and {m.name for m in agent.epoch.trainers} <= got.keys():
            host.ended = key
            self.finish(host)

    def finish(self, host: Host) -> None:
        """Ask whether the step counts."""
        agent = host.agent
        assert agent is not None
        if host.ended is None:
            return
        group, step = host.ended
        before = agent.held
        verdict = agent.finish_step(group, step)
        if verdict is Verdict.WAIT:
            return
        mean = tuple(sorted(host.inbox.pop(host.ended, {}).values()))
        host.ended = None
        if verdict is Verdict.GRANTED and agent.held > before:
            if self.steps.setdefault((group, step), mean) != mean:
                raise Violation(f"step {step} of group {group} has two means")
            if step > self.superseded.get(group, step):
                raise Violation(
                    f"{agent.name} completes step {step} of group {group}, ended at {self.superseded[group]}"
                )
            host.log = (*host.log, mean)
        self.at(self.now + self.random.uniform(0.05, 0.3), lambda: self.act(host, lambda _: self.begin(host)), "")

    def _timeout(self, host: Host, agent: Agent, group: int, step: int) -> None:
        if host.agent is agent and host.group == group and agent.held == step and not agent.fenced:
            self.act(host, lambda a: a.exchange_failed(self.now, group))

    def fetch(self, host: Host) -> None:
        """Fetch weights from a source, beside training; try again until it works."""
        agent = host.agent
        if agent is None or (epoch := agent.epoch) is None or agent.member is None or host.wanted == epoch.number:
            return
        if agent.member.trains and not agent.behind:
            return
        host.wanted = epoch.number
        source = self.names[
            self.random.choice([m.name for m in epoch.trainers if m.name != agent.name] or [agent.name])
        ]

        def read() -> None:
            giver = source.agent
            if giver is None or giver.member is None or not giver.member.trains or giver.behind or giver.held < 0:
                return
            if self.linked(source, host) and self.now >= source.stopped_until and giver.epoch is not None:
                got = giver.epoch.number, giver.held, source.log
                self.at(self.now + self.random.uniform(0.1, 2.0), lambda: self.act(host, lambda a: staged(a, *got)), "")

        def staged(now: Agent, number: int, held: int, log: Log) -> None:
            if now is not agent:
                return
            verdict = now.weights_fetched(number, held)
            if verdict is Verdict.GRANTED:
                host.log = log
                self.note(f"{now.name} has fetched step {held} of epoch {number}")
                self.check_held(host)
            elif verdict is Verdict.WAIT:
                self.at(self.now + 0.1, lambda: self.act(host, lambda a: staged(a, number, held, log)), "")
                return
            if now.member is not None and now.member.trains and not now.behind:
                self.begin(host)

        def again() -> None:
            if host.agent is agent and host.wanted == epoch.number:
                host.wanted = -1
                self.fetch(host)

        self.at(self.now + self.delay(), read, "")
        self.at(self.now + 2.5, lambda: self.act(host, lambda _: again()), "")

    # Invariants

    def check_decision(self, agent: Agent, epoch: Epoch) -> None:
        """At most one decision per epoch; a group ends at one step."""
        known = self.decided.setdefault(epoch.number, epoch)
        if known != epoch:
            raise Violation(f"two epochs {epoch.number}: {describe(known)} and, on {agent.name}, {describe(epoch)}")
        before = self.decided.get(epoch.number - 1)
        if before is not None and before.group != epoch.group:
            self.superseded[before.group] = epoch.step
        if len(agent.record.to_bytes()) > MAX_RECORD:
            raise Violation("a record is too long")

    def check_left(self, host: Host, epoch: Epoch) -> None:
        """Who leaves in order is not needed any more: a quorum knows, or has known before it was lost."""
        know = {name for name, number in self.known.items() if number >= epoch.number}
        if not is_quorum(epoch, know):
            raise Violation(f"{host.address} leaves, but only {sorted(know)} know of {describe(epoch)}")

    def check_lineage(self, host: Host, epoch: Epoch, me: Member) -> None:
        """Who trains holds what the epoch says, and it is the job's."""
        self.check_held(host)
        if me.trains and host.agent is not None and host.agent.held not in (me.held, NO_MODEL):
            raise Violation(f"{me.name} holds {host.agent.held}, epoch {epoch.number} says {me.held}")

    def check_held(self, host: Host) -> None:
        agent = host.agent
        if (
            agent is not None
            and agent.held != NO_MODEL
            and (len(host.log) != agent.held + 1 or host.log[0] != "initial")
        ):
            raise Violation(
                f"{agent.name} holds step {agent.held}, but its weights are {host.log[:1]} + {len(host.log) - 1}"
            )

    def check_step(self, agent: Agent, group: int, step: int, log: Log) -> None:
        """All that begin a step begin it with the same weights."""
        assert agent.epoch is not None
        base = log[: agent.epoch.group_step + 1]
        if self.bases.setdefault(group, base) != base:
            raise Violation(f"{agent.name} begins group {group} with other weights than the others")
        for earlier in range(agent.epoch.group_step, step):
            if self.steps.get((group, earlier)) != log[earlier + 1]:
                raise Violation(f"{agent.name}: step {earlier} of group {group} counts here only")

    # The end

    def settle(self) -> None:
        """Faults end. All live hosts must come to train in one epoch, if a quorum and the weights are left."""
        self.run(FAULTS_END_S)
        self.note("faults end")
        self.cut.clear()
        self.loss = 0.0
        self.slowest_s = min(self.slowest_s, 0.05)
        for host in self.hosts:
            host.stopped_until = min(host.stopped_until, self.now)
        for host in self.hosts:
            self.act(host, lambda agent: agent.tick(self.now))
        goal = self.now
        while self.now < LIMIT_S:
            self.run(self.now + 1.0)
            live = [h for h in self.hosts if h.agent is not None]
            if not self.can_go_on(live):
                goal = self.now
                if self.now > FAULTS_END_S + 8.0:
                    return  # and nobody trained on without a quorum, or the checks above had failed
            elif self.together(live) and self.now - goal > 3.0:
                return
        raise Violation(f"not together after {LIMIT_S - FAULTS_END_S:.0f} s without faults: {self.state()}")

    def can_go_on(self, live: list[Host]) -> bool:
        """Whether a quorum of the newest epoch known lives, and a live member of it holds weights."""
        agents = [h.agent for h in live if h.agent is not None]
        epochs = [a.epoch for a in agents if a.epoch is not None]
        if not epochs:
            return False
        # A decision that no live host has learned needs a quorum of the epoch before it, as if it were not made.
        newest = max(epochs, key=lambda epoch: epoch.number)
        # A recovered host votes, so names count, not incarnations.
        quorum = is_quorum(newest, {a.name for a in agents})
        return quorum and any(
            newest.member(a.name, a.record.incarnation) is not None and (a.epoch is not None and a.held != NO_MODEL)
            for a in agents
        )

    def together(self, live: list[Host]) -> bool:
        agents = [h.agent for h in live if h.agent is not None and not h.leaving]
        numbers = {a.epoch.number if a.epoch is not None else 0 for a in agents}
        return len(numbers) == 1 and all(a.member is not None and a.member.trains and not a.behind for a in agents)

    def state(self) -> str:
        return "; ".join(
            f"{h.agent.name}.{h.agent.record.incarnation} epoch {h.agent.epoch.number if h.agent.epoch else None} "
            f"held {h.agent.held} {'fenced ' if h.agent.fenced else ''}{h.agent.cause()}"
            for h in self.hosts
            if h.agent is not None
        )


def describe(epoch: Epoch) -> str:
    """An epoch in one line."""
    members = " ".join(f"{m.name}.{m.incarnation}@{m.held}{'*' if m.votes else ''}" for m in epoch.members)
    return f"epoch {epoch.number} step {epoch.step} group {epoch.group} [{members}] ({epoch.reason})"


def simulate(seed: int, *, faults: bool = True, ambush: float | None = None) -> Cluster:
    """Run one seed to its end.

    Raises:
        Violation: with the seed and the last events.
    """
    cluster = Cluster(seed, faults=faults, ambush=ambush)
    try:
        cluster.settle()
    except Exception as error:
        lines = "\n".join(cluster.trace)
        raise Violation(f"seed {seed}: {error}\nReplay: simulate({seed})\n{lines}") from error
    return cluster

"""One run of the simulation: hosts, their agents, and whether they come together once faults end."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence

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
    Slow,
    decode,
    encode,
)
from bagua.membership.epoch import NO_MODEL, is_quorum
from bagua.membership.messages import MAX_FRAME
from tests.elastic.protocol_simulation.faults import FAULTS_END_S, Faults
from tests.elastic.protocol_simulation.host import Host, Rank
from tests.elastic.protocol_simulation.invariants import Invariants, Violation, describe
from tests.elastic.protocol_simulation.network import Network
from tests.elastic.protocol_simulation.training import Training

LIMIT_S = 60.0
OPTIONS = Options(detect_s=1.0)


class Cluster:
    """One run.

    Args:
        seed: decides everything.
        faults: False for a quiet run.
        ambush: chance of a fault at each of the worst moments; drawn from the seed if None.
        compute_s: of a step, on the slowest rank of each host; none if empty.
        ranks: of each host; drawn from the seed if 0.
        options: of all agents.

    Attributes:
        slow: who was named, with the time, and by whom.
    """

    def __init__(
        self,
        seed: int,
        *,
        faults: bool = True,
        ambush: float | None = None,
        compute_s: Sequence[float] = (),
        ranks: int = 0,
        options: Options = OPTIONS,
    ) -> None:
        self._options = options
        self.slow: list[tuple[float, str, str]] = []
        self._random = random.Random(seed)
        self._seed, self._faulty = seed, faults
        drawn = self._random.choice((0.0, 0.1, 0.3)) if faults else 0.0
        self.network = Network(self._random, faults)
        size = len(compute_s) or self._random.randint(2, 5)
        self.hosts = [
            Host(f"h{i}", ranks or self._random.choice((1, 2)), durable=self._random.random() < 0.5)
            for i in range(size + 2)
        ]
        self.names: dict[str, Host] = {}
        self._due: dict[Agent, float] = {}  # when each agent's next tick is
        self._invariants = Invariants()
        for host, seconds in zip(self.hosts, compute_s, strict=False):
            host.compute_s = seconds
        # A connection to a slow host stays: the agents alone give it up.
        self._training = Training(self, self._invariants, *([math.inf] if compute_s else []))
        self._faults = Faults(self, drawn if ambush is None else ambush)
        founders = [Member(f"h{i}.0", 0, f"h{i}", seats=tuple(range(self.hosts[i].size))) for i in range(size)]
        first = Epoch.first(founders, tie_break=self._random.random() < 0.25)
        self.names.update({member.name: host for host, member in zip(self.hosts, founders, strict=False)})
        for host, member in zip(self.hosts, founders, strict=False):
            host.starts = 1
            self.boot(host, Record("job", member.name, 0, host.address), first)
        if faults:
            self._faults.plan(size)

    @property
    def decided(self) -> dict[int, Epoch]:
        """Epochs by number."""
        return self._invariants.decided

    @property
    def trace(self) -> deque[str]:
        """The last events."""
        return self.network.trace

    @property
    def count(self) -> int:
        """Events so far."""
        return self.network.count

    def boot(self, host: Host, record: Record, epoch: Epoch | None) -> None:
        """Start an agent on a host."""
        contacts = [h.address for h in self.hosts]
        seats = range(host.size) if epoch is not None else ()
        host.agent = agent = Agent(
            record, self._options, self.network.now, epoch=epoch, contacts=contacts, seed=self._seed, seats=seats
        )
        host.ranks = {}
        for number in range(host.size):
            host.add_rank(number, ("initial",) if epoch is not None else (f"fresh {record.name}.{record.incarnation}",))
            if epoch is None:
                agent.rank_started(number)
        self.names[record.name] = host
        self.act(host, lambda agent: agent.tick(self.network.now))

    def train(self, rank: Rank) -> None:
        """A rank has started on a host that is a member."""
        assert rank.host.agent is not None and rank.host.agent.epoch is not None
        self._training.enter_rank(rank, rank.host.agent.epoch)

    def first_completes(self, rank: Rank) -> None:
        """A rank has completed a step, before all others."""
        self._faults.ambush_completed(rank)

    def fetch_from(self, rank: Rank, source: Rank) -> None:
        """The weights that a newcomer is fetching are those that `source` has now."""
        self._training.fetch_from(rank, source)

    def act(self, host: Host, what: Callable[[Agent], None]) -> None:
        """Give an agent an input, and carry out what it asks for. The host may be killed between two actions."""
        agent = host.agent
        if agent is None:
            return
        if self.network.now < host.stopped_until:
            resumed = host.stopped_until + self._random.uniform(0, 0.01)
            self.network.at(resumed, lambda: self._act_on(host, agent, what))
            return
        self._act_on(host, agent, what)

    def _act_on(self, host: Host, agent: Agent, what: Callable[[Agent], None]) -> None:
        if host.agent is not agent:
            return
        what(agent)
        actions = agent.take()
        if (epoch := agent.epoch) is not None and epoch is not host.checked:
            host.checked = epoch
            self._invariants.check_decision(agent, epoch)
        dies = self._faulty and self.network.now < FAULTS_END_S and actions and self._random.random() < 0.0005
        for action in actions[: self._random.randint(0, len(actions)) if dies else None]:
            struck = self._faults.ambushed(host, action)
            self._carry_out(host, agent, action)
            if struck:
                break
        if dies and host.agent is agent:
            self._faults.kill(host, told=True)
            self.network.after(self._random.uniform(0.1, 3.0), lambda: self._faults.start(host))
        elif host.agent is agent:
            self._schedule_tick(host, agent)

    def _schedule_tick(self, host: Host, agent: Agent) -> None:
        due = max(agent.next_tick, self.network.now + 0.002)
        if due < self._due.get(agent, math.inf):
            self._due[agent] = due
            self.network.at(due, lambda: self._tick(host, agent, due))

    def _tick(self, host: Host, agent: Agent, due: float) -> None:
        if self._due.get(agent) == due:
            self._due[agent] = math.inf
            self.act(host, lambda a: a.tick(self.network.now))

    def _carry_out(self, host: Host, agent: Agent, action: Action) -> None:
        if isinstance(action, Persist):
            if host.durable:
                host.record = action.record
        elif isinstance(action, Send):
            self._send(host, action)
        elif isinstance(action, EpochBegan):
            self.network.note(f"{agent.name}@{agent.held} begins {describe(action.epoch)}")
            self._training.enter(host, action.epoch)
        elif isinstance(action, Excluded):
            self.network.note(f"{agent.name} is excluded by {describe(action.epoch)}")
            for rank in host.ranks.values():
                rank.drop_training((f"fresh {agent.name}, excluded",))
        elif isinstance(action, Left):
            self._invariants.check_left(host, action.epoch)
            self._faults.kill(host, told=False)
        elif isinstance(action, Slow):
            self.slow.append((self.network.now, action.name, agent.name))
        elif isinstance(action, Blocked):
            self.network.note(f"{agent.name} is blocked: {action.reason}")

    def _send(self, host: Host, send: Send) -> None:
        frame = encode(send.envelope)
        if len(frame) > MAX_FRAME:
            raise Violation(f"a frame of {len(frame)} bytes")
        target = next(h for h in self.hosts if h.address == send.address)
        for _ in range(self.network.copies()):
            self.network.after(self.network.delay(), lambda: self._deliver(host, target, frame))

    def _deliver(self, source: Host, target: Host, frame: bytes) -> None:
        if self.network.linked(source.address, target.address) and target.agent is not None:
            envelope = decode(frame)
            self.act(target, lambda agent: agent.receive(self.network.now, envelope))

    def settle(self) -> None:
        """Faults end. All live hosts must come to train in one epoch, if a quorum and the weights are left."""
        network = self.network
        network.run(FAULTS_END_S)
        network.note("faults end")
        network.calm()
        for host in self.hosts:
            host.stopped_until = min(host.stopped_until, network.now)
        for host in self.hosts:
            self.act(host, lambda agent: agent.tick(network.now))
        goal = network.now
        while network.now < LIMIT_S:
            network.run(network.now + 1.0)
            live = [h for h in self.hosts if h.agent is not None]
            if not _can_go_on(live):
                goal = network.now
                if network.now > FAULTS_END_S + 8.0:
                    return  # and nobody trained on without a quorum, or the checks above had failed
            elif _together(live) and network.now - goal > 3.0:
                return
        raise Violation(f"not together after {LIMIT_S - FAULTS_END_S:.0f} s without faults: {_state(self.hosts)}")


def _can_go_on(live: list[Host]) -> bool:
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


def _together(live: list[Host]) -> bool:
    agents = [h.agent for h in live if h.agent is not None and not h.leaving]
    numbers = {a.epoch.number if a.epoch is not None else 0 for a in agents}
    return len(numbers) == 1 and all(_all_train(h) for h in live if not h.leaving)


def _all_train(host: Host) -> bool:
    found = [rank.progress for rank in host.ranks.values()]
    return bool(found) and all(each is not None and each.trains and not each.behind for each in found)


def _state(hosts: list[Host]) -> str:
    return "; ".join(
        f"{h.agent.name}.{h.agent.record.incarnation} epoch {h.agent.epoch.number if h.agent.epoch else None} "
        f"held {h.agent.held} {'fenced ' if h.agent.fenced else ''}{h.agent.cause()}"
        for h in hosts
        if h.agent is not None
    )


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

"""Simulated faults: drawn at any time, and at the worst moments of the protocol."""

from __future__ import annotations

from bagua.membership import Action, Agent, EpochBegan, Record, Send
from bagua.membership.messages import Accepted
from tests.elastic.protocol_simulation.host import Host, Rank, Run

FAULTS_END_S = 8.0
_KINDS = ("kill", "kill", "stop", "partition", "one-way", "mute", "leave", "ranks", "rank", "rank", "link")


class Faults:
    """Kills, stops, restarts and parts the hosts of a run.

    Args:
        run: the simulation.
        ambush: chance of a fault at each of the worst moments.
    """

    def __init__(self, run: Run, ambush: float) -> None:
        self._run, self._network, self._ambush = run, run.network, ambush
        self._random = run.network.random
        self._struck: set[int] = set()  # epochs whose first host to know of was cut off, or could have been

    def plan(self, size: int) -> None:
        """Draw the faults of a run with `size` founders; the other hosts may arrive later."""
        for late in self._run.hosts[size:]:
            if self._random.random() < 0.6:
                when = self._random.uniform(0, FAULTS_END_S)
                self._network.at(when, lambda h=late: self.start(h), f"start {late.address}")
        for _ in range(self._random.randint(1, 5)):
            when, host = self._random.uniform(0.0, FAULTS_END_S), self._random.choice(self._run.hosts)
            kind = self._random.choice(_KINDS)
            self._network.at(when, lambda k=kind, h=host: self._fault(k, h), f"{kind} {host.address}")

    def _fault(self, kind: str, host: Host) -> None:
        lasts, hosts, network = self._random.uniform(0.1, 5.0), self._run.hosts, self._network
        if kind == "kill":
            self.kill(host, told=self._random.random() < 0.7)
            if self._random.random() < 0.7:
                network.after(lasts, lambda: self.start(host), f"start {host.address}")
        elif kind == "stop":
            host.stopped_until = network.now + lasts
        elif kind in ("partition", "one-way"):
            network.sever(self._links(both_ways=kind == "partition"), lasts)
        elif kind == "mute":  # those that train with it do not hear it; those that fetch its weights do
            trains = [h.address for h in hosts if h.agent and h.agent.member and h.agent.member.trains]
            network.sever({(host.address, other) for other in trains if other != host.address}, lasts)
        elif kind == "leave" and host.agent is not None and sum(h.up and not h.leaving for h in hosts) > 2:
            host.leaving = True
            self._run.act(host, lambda agent: agent.leave(network.now))
        elif kind in ("rank", "ranks") and host.ranks:  # ranks are killed and started again
            some = sorted(host.ranks) if kind == "ranks" else [self._random.choice(sorted(host.ranks))]
            for number in some:
                self._run.act(host, lambda agent, n=number: self._lose_rank(host, agent, n))
        elif kind == "link" and host.agent is not None:
            self._run.act(
                host, lambda agent: agent.exchange_failed(network.now, agent.epoch.group if agent.epoch else 0)
            )

    def _links(self, both_ways: bool) -> set[tuple[str, str]]:
        """Links from some of the hosts to the others."""
        addresses = [h.address for h in self._run.hosts]
        side = set(self._random.sample(addresses, self._random.randint(1, len(addresses) // 2)))
        links = {(a, b) for a in addresses for b in addresses if a in side and b not in side}
        if both_ways:
            return links | {(b, a) for a, b in links}
        if self._random.random() < 0.5:
            return {link for link in sorted(links) if self._random.random() < 0.5}
        return links

    def _lose_rank(self, host: Host, agent: Agent, number: int) -> None:
        if host.ranks.pop(number, None) is None:
            return
        self._network.note(f"kill {agent.name}/{number}")
        agent.rank_ended(self._network.now, number)

        def start(now: Agent) -> None:
            """As a launcher does: once no group counts on the one before it."""
            if now is not agent or (self._random.random() < 0.1 and host.ranks):
                return  # it stays away
            if now.member is None or number in now.member.seats:
                self._network.after(0.2, lambda: self._run.act(host, start))
                return
            later = number + host.size
            self._network.note(f"start {agent.name}/{later}")
            now.rank_started(later)
            host.add_rank(later, (f"fresh {agent.name}/{later}",))
            self._run.train(host.ranks[later])

        self._network.after(self._random.uniform(0.05, 1.0), lambda: self._run.act(host, start))

    def ambushed(self, host: Host, action: Action) -> bool:
        """Strike where it hurts most: who has decided is cut off before it tells; who has accepted is restarted."""
        network = self._network
        if network.now > FAULTS_END_S or not self._ambush or self._random.random() >= self._ambush:
            return False
        others = [h.address for h in self._run.hosts if h is not host]
        if isinstance(action, EpochBegan) and action.epoch.number not in self._struck:
            self._struck.add(action.epoch.number)
            network.sever({(host.address, other) for other in others}, self._random.uniform(0.5, 5.0))
        elif isinstance(action, Send) and isinstance(action.envelope.body, Accepted):
            self.kill(host, told=False)
            network.after(self._random.uniform(0.0, 1.0), lambda: self.start(host))
            return True
        return False

    def ambush_completed(self, rank: Rank) -> None:
        """Whoever completes a step first is not heard any more by those that train, while newcomers fetch its weights.

        If no other has all contributions yet, these weights hold a step that never counts.
        """
        network, hosts = self._network, self._run.hosts
        newcomers = [
            each
            for host in hosts
            for each in host.ranks.values()
            if each.progress is not None and not each.progress.trains
        ]
        if network.now > FAULTS_END_S or not self._ambush or not newcomers or self._random.random() >= self._ambush:
            return
        source = rank.host.address
        trains = [h.address for h in hosts if h.agent and h.agent.member and h.agent.member.trains]
        network.sever({(source, other) for other in trains if other != source}, self._random.uniform(1.5, 5.0))
        for each in newcomers:
            self._run.fetch_from(each, rank)

    def kill(self, host: Host, told: bool) -> None:
        """The host loses all but its record. Others are told, or notice by its silence."""
        if (agent := host.agent) is None:
            return
        network = self._network
        network.note(f"kill {agent.name}")
        host.agent, host.ranks = None, {}
        for other in self._run.hosts if told else ():
            if other is not host and network.linked(host.address, other.address):
                network.after(
                    network.delay(), lambda o=other: self._run.act(o, lambda a: a.closed(network.now, agent.name))
                )

    def start(self, host: Host) -> None:
        """Start a host that is down: with its record if it has one, else under another name."""
        if host.agent is not None or host.leaving:
            return
        self._network.note(f"start {host.address}{' with its record' if host.record is not None else ''}")
        if host.record is not None:
            record = Record.recover(host.record)
        else:
            record = Record("job", f"{host.address}.{host.starts}", 0, host.address)
            host.starts += 1
        host.stopped_until = 0.0
        self._run.boot(host, record, None)

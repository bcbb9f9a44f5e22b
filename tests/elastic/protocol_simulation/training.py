"""Simulated training: each host is one rank, and a step is an all-gather of contributions."""

from __future__ import annotations

from bagua.membership import Agent, Epoch, Verdict
from tests.elastic.protocol_simulation.host import Host, Log, Run
from tests.elastic.protocol_simulation.invariants import Invariants

EXCHANGE_S = 3.0  # until an engine gives up an exchange that does not end


class Training:
    """What the engines of all hosts do."""

    def __init__(self, run: Run, invariants: Invariants) -> None:
        self._run, self._network, self._invariants = run, run.network, invariants
        self._random = run.network.random

    def enter(self, host: Host, epoch: Epoch) -> None:
        """What the engine does when an epoch begins."""
        agent = host.agent
        assert agent is not None
        me = agent.member
        assert me is not None
        self._invariants.check_lineage(host, epoch, me)
        if epoch.group != host.group:
            host.group, host.ended, host.wanted = epoch.group, None, -1
            host.inbox = {key: value for key, value in host.inbox.items() if key[0] >= epoch.group}
        if not me.trains or agent.behind:
            self._fetch(host)
        elif host.ended is not None:
            self._finish(host)
        else:
            self._begin(host)

    def _begin(self, host: Host) -> None:
        """Begin the next step: send a contribution to all trainers."""
        agent = host.agent
        if agent is None or agent.epoch is None or host.ended is not None:
            return
        group, step = host.group, agent.held
        if agent.start_step(group, step) is not Verdict.GRANTED:
            return
        self._invariants.check_start(agent, group, step, host.log)
        mine = f"{agent.name}:{step}"
        for member in agent.epoch.trainers:
            self._contribute(host, self._run.names[member.name], group, step, agent.name, mine)
        self._network.after(EXCHANGE_S, lambda: self._timeout(host, agent, group, step))

    def _contribute(self, host: Host, target: Host, group: int, step: int, name: str, value: str) -> None:
        def arrive() -> None:
            if not self._network.linked(host.address, target.address):
                if self._random.random() < 0.7:  # TCP sends again until the link heals, or the exchange is given up
                    self._network.after(0.2, arrive)
                return
            if target.agent is not None and group >= target.group:
                target.inbox.setdefault((group, step), {})[name] = value
                self._run.act(target, lambda _: self._complete(target))

        self._network.after(0.0 if host is target else self._network.delay(), arrive)

    def _complete(self, host: Host) -> None:
        """The exchange ends when the contributions of all trainers are there."""
        agent = host.agent
        if agent is None or agent.epoch is None or agent.epoch.group != host.group or agent.behind:
            return
        key = (host.group, agent.held)
        got = host.inbox.get(key, {})
        if host.ended is None and {m.name for m in agent.epoch.trainers} <= got.keys():
            host.ended = key
            self._finish(host)

    def _finish(self, host: Host) -> None:
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
            self._invariants.check_completed(agent, group, step, mean)
            host.log = (*host.log, mean)
        self._network.after(self._random.uniform(0.05, 0.3), lambda: self._run.act(host, lambda _: self._begin(host)))

    def _timeout(self, host: Host, agent: Agent, group: int, step: int) -> None:
        if host.agent is agent and host.group == group and agent.held == step and not agent.fenced:
            self._run.act(host, lambda a: a.exchange_failed(self._network.now, group))

    def _fetch(self, host: Host) -> None:
        """Fetch weights from a source, beside training; try again until it works."""
        agent = host.agent
        if agent is None or (epoch := agent.epoch) is None or agent.member is None or host.wanted == epoch.number:
            return
        if agent.member.trains and not agent.behind:
            return
        network = self._network
        host.wanted = epoch.number
        names = [m.name for m in epoch.trainers if m.name != agent.name] or [agent.name]
        source = self._run.names[self._random.choice(names)]

        def read() -> None:
            giver = source.agent
            if giver is None or giver.member is None or not giver.member.trains or giver.behind or giver.held < 0:
                return
            reachable = network.linked(source.address, host.address) and network.now >= source.stopped_until
            if reachable and giver.epoch is not None:
                got = giver.epoch.number, giver.held, source.log
                network.after(self._random.uniform(0.1, 2.0), lambda: self._run.act(host, lambda a: staged(a, *got)))

        def staged(now: Agent, number: int, held: int, log: Log) -> None:
            if now is agent:
                self._put_in_place(host, now, number, held, log)

        def again() -> None:
            if host.agent is agent and host.wanted == epoch.number:
                host.wanted = -1
                self._fetch(host)

        network.after(network.delay(), read)
        network.after(2.5, lambda: self._run.act(host, lambda _: again()))

    def _put_in_place(self, host: Host, agent: Agent, number: int, held: int, log: Log) -> None:
        """Ask whether fetched weights count; again later if an epoch is being decided."""
        verdict = agent.weights_fetched(number, held)
        if verdict is Verdict.GRANTED:
            host.log = log
            self._network.note(f"{agent.name} has fetched step {held} of epoch {number}")
            self._invariants.check_held(host)
        elif verdict is Verdict.WAIT:

            def again(now: Agent) -> None:
                if now is agent:
                    self._put_in_place(host, agent, number, held, log)

            self._network.after(0.1, lambda: self._run.act(host, again))
            return
        if agent.member is not None and agent.member.trains and not agent.behind:
            self._begin(host)

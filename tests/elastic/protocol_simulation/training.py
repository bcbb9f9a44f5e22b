"""Simulated training: a step is an all-gather of contributions among the ranks of all hosts."""

from __future__ import annotations

from collections.abc import Callable

from bagua.membership import Agent, Epoch, Verdict
from bagua.membership.epoch import NO_MODEL
from tests.elastic.protocol_simulation.host import Host, Log, Rank, Run
from tests.elastic.protocol_simulation.invariants import Invariants

EXCHANGE_S = 3.0  # until an engine gives up an exchange that does not end


class Training:
    """What the engines of all ranks do.

    Args:
        exchange_s: until an engine gives up an exchange that does not end.
    """

    def __init__(self, run: Run, invariants: Invariants, exchange_s: float = EXCHANGE_S) -> None:
        self._exchange_s = exchange_s
        self._run, self._network, self._invariants = run, run.network, invariants
        self._random = run.network.random
        self._completed: set[tuple[int, int]] = set()  # (group, step) of which a rank has the mean

    def enter(self, host: Host, epoch: Epoch) -> None:
        """What the engines of a host do when an epoch begins."""
        agent = host.agent
        assert agent is not None and agent.member is not None
        self._invariants.check_lineage(host, epoch, agent.member)
        for rank in tuple(host.ranks.values()):
            self.enter_rank(rank, epoch)

    def enter_rank(self, rank: Rank, epoch: Epoch) -> None:
        """What one of them does."""
        progress = rank.progress
        if progress is None:
            return
        if epoch.group != rank.group:
            rank.group, rank.ended, rank.wanted = epoch.group, None, -1
            rank.inbox = {key: value for key, value in rank.inbox.items() if key[0] >= epoch.group}
        if not progress.trains:
            self._network.after(self._random.uniform(0.0, 0.5), lambda: self._act(rank, lambda _: self._arrive(rank)))
        elif progress.behind:
            self._fetch(rank)
        elif rank.ended is not None:
            self._finish(rank)
        else:
            self._begin(rank)

    def _arrive(self, rank: Rank) -> None:
        """Ask for a place."""
        agent, progress = rank.host.agent, rank.progress
        if agent is not None and agent.member is not None and progress is not None and not progress.trains:
            agent.rank_wants_weights(self._network.now, rank.number)
            self._fetch(rank)

    def _begin(self, rank: Rank) -> None:
        """Begin the next step: compute, then send a contribution to all ranks that train."""
        agent, progress = rank.host.agent, rank.progress
        if agent is None or agent.epoch is None or progress is None or rank.ended is not None:
            return
        group, step = rank.group, progress.held
        verdict = agent.start_step(group, step, rank.number, self._network.now)
        if verdict is Verdict.WAIT and not agent.fenced:  # for a moment: no new epoch need follow
            self._network.after(0.01, lambda: self._act(rank, lambda _: self._begin(rank)))
        if verdict is not Verdict.GRANTED:
            return
        self._invariants.check_start(agent, group, step, rank.log)
        if not rank.compute_s:
            self._exchange(rank, agent, group, step)
            return

        def computed(now: Agent) -> None:
            current = rank.progress
            if now is agent and current is not None and (rank.group, current.held) == (group, step):
                self._exchange(rank, now, group, step)

        self._network.after(rank.compute_s, lambda: self._act(rank, computed))

    def _exchange(self, rank: Rank, agent: Agent, group: int, step: int) -> None:
        assert agent.epoch is not None
        agent.arrived(self._network.now, group, step, rank.number)
        mine = f"{rank.name}:{step}"
        for member in agent.epoch.trainers:
            for number in member.seats:
                self._contribute(rank, member.name, number, group, step, mine)
        self._network.after(self._exchange_s, lambda: self._timeout(rank, agent, group, step))

    def _ranks(self, epoch: Epoch) -> list[Rank]:
        """Those that run of the ranks that train."""
        hosts = [(self._run.names[member.name], member) for member in epoch.trainers]
        return [
            host.ranks[number]
            for host, member in hosts
            for number in member.seats
            if host.agent is not None and host.agent.name == member.name and number in host.ranks
        ]

    def _contribute(self, rank: Rank, to: str, number: int, group: int, step: int, value: str) -> None:
        source, host, name = rank.host, self._run.names[to], rank.name

        def arrive() -> None:
            if not self._network.linked(source.address, host.address):
                if self._random.random() < 0.7:  # TCP sends again until the link heals, or the exchange is given up
                    self._network.after(0.2, arrive)
                return
            target = host.ranks.get(number) if host.agent is not None and host.agent.name == to else None
            if target is not None and group >= target.group:
                target.inbox.setdefault((group, step), {})[name] = value
                self._act(target, lambda _: self._complete(target))

        self._network.after(0.0 if source is host else self._network.delay(), arrive)

    def _complete(self, rank: Rank) -> None:
        """The exchange ends when the contributions of all ranks that train are there."""
        agent, progress = rank.host.agent, rank.progress
        if agent is None or agent.epoch is None or agent.epoch.group != rank.group or progress is None:
            return
        if progress.behind or not progress.trains or rank.ended is not None:
            return
        key = (rank.group, progress.held)
        wanted = {f"{member.name}/{number}" for member in agent.epoch.trainers for number in member.seats}
        if wanted <= rank.inbox.get(key, {}).keys():
            rank.ended = key
            self._finish(rank)

    def _finish(self, rank: Rank) -> None:
        """Ask whether the step counts."""
        agent, progress = rank.host.agent, rank.progress
        assert agent is not None and progress is not None
        if rank.ended is None:
            return
        group, step = rank.ended
        before = progress.held
        verdict = agent.finish_step(group, step, rank.number)
        if verdict is Verdict.WAIT:
            return
        mean = tuple(sorted(rank.inbox.pop(rank.ended, {}).values()))
        rank.ended = None
        if verdict is Verdict.GRANTED and progress.held > before:
            self._invariants.check_completed(agent, group, step, mean)
            rank.log = (*rank.log, mean)
            if (group, step) not in self._completed:
                self._completed.add((group, step))
                self._run.first_completes(rank)
        self._network.after(self._random.uniform(0.05, 0.3), lambda: self._act(rank, lambda _: self._begin(rank)))

    def _timeout(self, rank: Rank, agent: Agent, group: int, step: int) -> None:
        progress = rank.progress
        if rank.host.agent is agent and rank.group == group and progress is not None and progress.held == step:
            self._act(rank, lambda a: None if a.fenced else a.exchange_failed(self._network.now, group))

    def _fetch(self, rank: Rank) -> None:
        """Fetch weights from a rank that has them, beside training; try again until it works."""
        agent, progress = rank.host.agent, rank.progress
        if agent is None or (epoch := agent.epoch) is None or agent.member is None or progress is None:
            return
        if rank.wanted == epoch.number or (progress.trains and not progress.behind):
            return
        network = self._network
        rank.wanted = epoch.number
        givers = [each for each in self._ranks(epoch) if each is not rank]
        if givers and (progress.trains or agent.learns(rank.number)):
            source = self._random.choice(givers)
            network.after(network.delay(), lambda: self._read(rank, source, agent))

        def again() -> None:
            if rank.host.agent is agent and rank.wanted == epoch.number:
                rank.wanted = -1
                self._fetch(rank)

        network.after(2.5, lambda: self._act(rank, lambda _: again()))

    def fetch_from(self, rank: Rank, source: Rank) -> None:
        """The weights that a rank is fetching are those that `source` has now."""
        agent, progress = rank.host.agent, rank.progress
        if agent is not None and progress is not None and not progress.trains and agent.learns(rank.number):
            self._read(rank, source, agent)

    def _read(self, rank: Rank, source: Rank, agent: Agent) -> None:
        network, giver, has = self._network, source.host.agent, source.progress
        if giver is None or giver.epoch is None or has is None or not has.trains or has.behind or has.held == NO_MODEL:
            return
        if network.linked(source.host.address, rank.host.address) and network.now >= source.host.stopped_until:
            number, held, log = giver.epoch.number, has.held, source.log

            def staged(now: Agent) -> None:
                if now is agent:
                    self._put_in_place(rank, now, number, held, log)

            network.after(self._random.uniform(0.1, 2.0), lambda: self._act(rank, staged))

    def _put_in_place(self, rank: Rank, agent: Agent, number: int, held: int, log: Log) -> None:
        """Ask whether fetched weights count; again later if an epoch is being decided."""
        verdict = agent.weights_fetched(number, held, rank.number)
        if verdict is Verdict.GRANTED:
            rank.log = log
            self._network.note(f"{rank.name} has fetched step {held} of epoch {number}")
            self._invariants.check_held(rank)
        elif verdict is Verdict.WAIT:

            def again(now: Agent) -> None:
                if now is agent:
                    self._put_in_place(rank, agent, number, held, log)

            self._network.after(0.1, lambda: self._act(rank, again))
            return
        progress = rank.progress
        if progress is not None and progress.trains and not progress.behind:
            self._begin(rank)

    def _act(self, rank: Rank, what: Callable[[Agent], None]) -> None:
        """Let a rank do something, unless it has been killed."""

        def done(agent: Agent) -> None:
            if rank.runs:
                what(agent)

        self._run.act(rank.host, done)

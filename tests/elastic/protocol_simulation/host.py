"""A simulated machine, and what the parts of the simulation need of the run they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from bagua.membership import Agent, Epoch, Record
from bagua.membership.progress import Progress
from tests.elastic.protocol_simulation.network import Network

Log = tuple[Any, ...]  # ("initial" or the host's own weights, then one entry per step)


@dataclass(eq=False)
class Rank:
    """A process of a host: its weights, and its part in the exchanges."""

    host: Host
    number: int
    log: Log
    group: int = -1
    inbox: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)  # contributions by (group, step)
    ended: tuple[int, int] | None = None  # an exchange that has ended and waits for the verdict
    wanted: int = -1  # epoch for which weights are being fetched

    @property
    def name(self) -> str:
        """Unlike that of any other, past ones too."""
        return f"{self.host.agent.name if self.host.agent else self.host.address}/{self.number}"

    @property
    def progress(self) -> Progress | None:
        """What the agent says of it; None if it has ended, or its host."""
        agent = self.host.agent
        return agent.seats.progress(self.number) if agent is not None and self.runs else None

    @property
    def compute_s(self) -> float:
        """Of a step, before its exchange. If its host is slow, one rank of the host is."""
        seconds = self.host.compute_s
        return seconds if self.number % self.host.size == self.host.size - 1 else min(seconds, 0.1)

    @property
    def runs(self) -> bool:
        """Whether it has not been killed."""
        return self.host.ranks.get(self.number) is self

    def drop_training(self, log: Log) -> None:
        """Forget the exchange and the weights that are being fetched; the weights become `log`."""
        self.log, self.group, self.ended, self.wanted = log, -1, None, -1


@dataclass(eq=False)
class Host:
    """A machine: an address, at most one running agent with its ranks, perhaps a record on its disk."""

    address: str
    size: int = 1  # ranks that it starts
    agent: Agent | None = None
    record: bytes | None = None
    durable: bool = False
    starts: int = 0
    stopped_until: float = 0.0
    ranks: dict[int, Rank] = field(default_factory=dict)
    leaving: bool = False
    compute_s: float = 0.0  # of a step on its slowest rank, before the exchange
    checked: Epoch | None = None

    @property
    def up(self) -> bool:
        return self.agent is not None

    def add_rank(self, number: int, log: Log) -> None:
        """Start a process."""
        self.ranks[number] = Rank(self, number, log)


class Run(Protocol):
    """What faults and training need of the simulation as a whole."""

    hosts: list[Host]
    names: dict[str, Host]  # by name of an agent, past ones too
    network: Network

    def act(self, host: Host, what: Callable[[Agent], None]) -> None:
        """Give the agent of a host an input, and carry out what it asks for."""

    def train(self, rank: Rank) -> None:
        """A rank has started on a host that is a member."""

    def boot(self, host: Host, record: Record, epoch: Epoch | None) -> None:
        """Start an agent on a host."""

    def first_completes(self, rank: Rank) -> None:
        """A rank has completed a step, before all others."""

    def fetch_from(self, rank: Rank, source: Rank) -> None:
        """The weights that a newcomer is fetching are those that `source` has now."""

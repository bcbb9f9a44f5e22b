"""A simulated machine, and what the parts of the simulation need of the run they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from bagua.membership import Agent, Epoch, Record
from tests.elastic.protocol_simulation.network import Network

Log = tuple[Any, ...]  # ("initial" or the host's own weights, then one entry per step)


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

    def drop_training(self, log: Log) -> None:
        """Forget the exchange and the weights that are being fetched; the weights become `log`."""
        self.log, self.group, self.ended, self.wanted = log, -1, None, -1


class Run(Protocol):
    """What faults and training need of the simulation as a whole."""

    hosts: list[Host]
    names: dict[str, Host]  # by name of an agent, past ones too
    network: Network

    def act(self, host: Host, what: Callable[[Agent], None]) -> None:
        """Give the agent of a host an input, and carry out what it asks for."""

    def boot(self, host: Host, record: Record, epoch: Epoch | None) -> None:
        """Start an agent on a host."""

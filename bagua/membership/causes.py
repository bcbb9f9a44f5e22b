"""Why a host wants another epoch."""

from __future__ import annotations

from typing import Protocol

from bagua.membership.departure import Departure
from bagua.membership.epoch import Epoch, Member
from bagua.membership.peers import Peers
from bagua.membership.seats import Seats

__all__ = ["Causes"]


class _Host(Protocol):
    """What is asked of an agent."""

    payload: str
    seats: Seats

    @property
    def name(self) -> str: ...
    @property
    def epoch(self) -> Epoch | None: ...
    @property
    def member(self) -> Member | None: ...


class Causes:
    """In words, for the log; empty where the host does not want one.

    Args:
        host: the agent.
        peers: what it has heard of the others.
        departure: whether it leaves.
    """

    def __init__(self, host: _Host, peers: Peers, departure: Departure) -> None:
        self._host, self._peers, self._departure = host, peers, departure

    def own(self, now: float) -> str:
        """Any cause of this host."""
        return self.change(now) or self.readiness(now)

    def change(self, now: float) -> str:
        """Something is lost, or changes: a step in progress may never end."""
        host, epoch, me = self._host, self._host.epoch, self._host.member
        if epoch is None or epoch.by_name.get(host.name) is None:
            return ""
        if loss := self._peers.loss:
            return loss
        if me is None:
            return f"{host.name} restarted"
        if self._departure.begun and any(m.trains and m.name != host.name for m in epoch.members):
            return f"{host.name} leaves"
        if me.trains and host.seats.broken:
            return f"{host.name} lost a connection of its group"
        if me.payload != host.payload or (me.trains and set(me.seats) - set(host.seats.listed(now))):
            return f"{host.name} lost or gained ranks"
        return ""

    def readiness(self, now: float) -> str:
        """Ranks of this host are to train, and nothing is lost: a step in progress can end first."""
        host, epoch, me, listed = self._host, self._host.epoch, self._host.member, self._host.seats.listed(now)
        if epoch is None or me is None:
            return ""
        if me.trains and me.seats != listed:
            return f"{host.name} gained ranks"
        # One that is more than a step behind would get no vote, and ask again at once.
        wanted = not me.trains or (not me.votes and host.seats.held >= epoch.step - 1)
        return f"{host.name} has the weights" if listed and not host.seats.behind and wanted else ""

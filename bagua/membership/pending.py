"""What other hosts have asked for, until it expires: a request that still stands is repeated with every heartbeat."""

from __future__ import annotations

from bagua.membership.epoch import Epoch, Member
from bagua.membership.messages import MAX_MEMBERS

__all__ = ["Pending"]

_MAX_JOINS = 64


class Pending:
    """Hosts that want to join, and members that want another epoch. Bounded: what is too much is asked again later."""

    def __init__(self) -> None:
        self._joins: dict[str, tuple[Member, float]] = {}
        self._requests: dict[str, tuple[str, float, bool]] = {}

    @property
    def joins(self) -> list[Member]:
        """Hosts that want to join."""
        return [member for member, _ in self._joins.values()]

    @property
    def request(self) -> str:
        """Why a member wants another epoch; empty if none does."""
        return next((reason for reason, _, _ in self._requests.values()), "")

    @property
    def can_wait(self) -> bool:
        """Whether members want another epoch, and none because a member is lost."""
        return bool(self._requests) and all(can_wait for _, _, can_wait in self._requests.values())

    def incarnation(self, name: str) -> int | None:
        """Of a host that wants to join."""
        return self._joins[name][0].incarnation if name in self._joins else None

    def join(self, member: Member, until: float) -> None:
        """Note a host that wants to join."""
        if member.name in self._joins or len(self._joins) < _MAX_JOINS:
            self._joins[member.name] = member, until

    def ask(self, name: str, reason: str, until: float, can_wait: bool) -> None:
        """Note a member that wants another epoch."""
        if name in self._requests or len(self._requests) < MAX_MEMBERS:
            self._requests[name] = reason, until, can_wait

    def settle(self, epoch: Epoch) -> None:
        """An epoch is decided: requests are made for the next one, joins stand unless granted."""
        self._requests.clear()
        self._joins = {
            name: each for name, each in self._joins.items() if epoch.member(name, each[0].incarnation) is None
        }

    def expire(self, now: float) -> None:
        """Forget what was not repeated."""
        self._joins = {name: each for name, each in self._joins.items() if each[1] > now}
        self._requests = {name: each for name, each in self._requests.items() if each[1] > now}

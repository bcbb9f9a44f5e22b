"""What a host has heard of the others: who is lost, restarted or slow, and what they have asked for."""

from __future__ import annotations

from bagua.membership.actions import Slow
from bagua.membership.detector import Detector, place
from bagua.membership.epoch import Epoch, Member
from bagua.membership.messages import MAX_PAYLOAD, Envelope, Heartbeat, Join
from bagua.membership.options import Options
from bagua.membership.pending import Pending

__all__ = ["Peers"]


class Peers:
    """The other hosts, as this one sees them.

    Args:
        name: of this host.
        options: times.
        now: seconds on any clock that never goes back.
    """

    def __init__(self, name: str, options: Options, now: float) -> None:
        self._name, self._remember_s = name, options.join_s
        self._epoch: Epoch | None = None
        self._detector = Detector(options.detect_s, options.max_wait_s, now)
        self._pending = Pending()
        self._recovered: set[str] = set()  # members that answer with a later incarnation

    @property
    def suspected(self) -> dict[str, str]:
        """Members that are taken for lost, and why."""
        return {name: self._detector.why(name) for name in self._detector.suspected}

    @property
    def joining(self) -> list[Member]:
        """Hosts that have asked to take part, as learners."""
        return self._pending.joins

    @property
    def request(self) -> str:
        """Why a member wants another epoch; empty if none does."""
        return self._pending.request

    @property
    def loss(self) -> str:
        """Which members are lost or have restarted, in words; empty if none."""
        if lost := self.suspected:
            return "; ".join(f"{name} is lost: {why}" for name, why in sorted(lost.items()))[:MAX_PAYLOAD]
        return f"{', '.join(sorted(self._recovered))} restarted"[:MAX_PAYLOAD] if self._recovered else ""

    @property
    def unheard(self) -> tuple[int, ...]:
        """Places in `Epoch.members` of those that are taken for lost."""
        members = () if self._epoch is None else self._epoch.members
        return tuple(place for place, member in enumerate(members) if self._detector.why(member.name))

    def adopt(self, epoch: Epoch) -> None:
        """An epoch is decided: watch its members."""
        self._epoch = epoch
        self._recovered.clear()
        self._pending.settle(epoch)
        self._detector.watch({m.name: m.trains for m in epoch.members if m.name != self._name})

    def is_outdated(self, envelope: Envelope) -> bool:
        """Whether its sender has been recovered since: a later incarnation is a member or wants to join."""
        listed = self._listed(envelope.sender)
        found = (listed.incarnation if listed is not None else None, self._pending.incarnation(envelope.sender))
        return any(known is not None and envelope.incarnation < known for known in found)

    def hear(self, now: float, envelope: Envelope) -> None:
        """A message has come that is not outdated."""
        body, sender = envelope.body, envelope.sender
        self._detector.heard(now, sender, place(body.started, body.arrived) if isinstance(body, Heartbeat) else None)
        listed = self._listed(sender)
        if listed is not None and envelope.incarnation > listed.incarnation:
            self._recovered.add(sender)
        is_member = listed is not None and listed.incarnation == envelope.incarnation
        if isinstance(body, Join) and self._epoch is not None and not is_member:
            member = Member(sender, envelope.incarnation, envelope.address, body.payload)
            self._pending.join(member, now + self._remember_s)

    @property
    def can_wait(self) -> bool:
        """Whether members want another epoch, and none because a member is lost."""
        return self._pending.can_wait

    def ask(self, now: float, name: str, reason: str, can_wait: bool) -> None:
        """A member wants another epoch."""
        self._pending.ask(name, reason, now + self._remember_s, can_wait)

    def closed(self, name: str) -> None:
        """The connection to `name` was closed at its end."""
        self._detector.closed(name)

    def tick(self, now: float, mine: int | None, fenced: bool) -> list[Slow]:
        """Time has passed. Returns members that have become slow; the arguments are those of `Detector.tick`."""
        self._pending.expire(now)
        return [Slow(name, waited) for name, waited in self._detector.tick(now, mine, fenced)]

    def _listed(self, name: str) -> Member | None:
        return None if self._epoch is None else self._epoch.by_name.get(name)

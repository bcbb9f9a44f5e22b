"""Which members are taken for lost: by a closed connection at once, by silence, or (if told so) by slowness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Detector", "place"]

_REMEMBER_S = 60.0  # a closed connection: far longer than it takes to decide an epoch
_SHARE = 0.2  # of the time for which a member may be waited for, in short waits, without being called slow


def place(started: int, arrived: bool) -> int:
    """How far a member is, as a number that grows. Odd: it waits for those whose numbers are even and smaller."""
    return 2 * started + arrived


@dataclass
class _Peer:
    heard: float
    trains: bool
    place: int = 0
    closed: bool = False
    waited_since: float = math.inf
    debt: float = 0.0  # time for which it was waited for, less `_SHARE` of the time since
    counted: float = -math.inf  # until when it is in the debt
    told: bool = False  # that it is slow


class Detector:
    """Suspicion of members. It may be wrong: agreement does not depend on it, only how soon it comes.

    Args:
        detect_s: silence after which a member is suspected; waiting after which it is called slow.
        max_wait_s: how long to wait for a member that answers but does not go on; `math.inf` for ever.
        now: seconds on any clock that never goes back.
    """

    def __init__(self, detect_s: float, max_wait_s: float, now: float) -> None:
        self._detect_s, self._max_wait_s = detect_s, max_wait_s
        self._peers: dict[str, _Peer] = {}
        self._closed: dict[str, float] = {}  # of whom, members or not, and when; until they are heard again
        self._now = now
        self._mine: int | None = None
        self._arrived = math.inf  # since when this member waits in an exchange

    def watch(self, trains: Mapping[str, bool]) -> None:
        """Watch these and nobody else, from now on. Those that do not train are not waited for.

        A member whose connection was closed while it was voted on, or before, is lost: it does not get `detect_s` anew.
        """
        self._closed = {name: at for name, at in self._closed.items() if self._now - at < _REMEMBER_S}
        self._peers = {name: _Peer(self._now, value, closed=name in self._closed) for name, value in trains.items()}

    def heard(self, now: float, name: str, place: int | None = None) -> None:
        """A message came from `name`. It clears a suspicion of silence, and its `place` one of slowness."""
        self._closed.pop(name, None)
        if (peer := self._peers.get(name)) is not None:
            peer.heard, peer.closed = self._now, False
            if place is None:
                return
            peer.place = place
            if peer.trains and self._owes(peer) and now > self._arrived:
                # News, unlike what was heard before the wait. A process that was stopped itself counts little of it.
                peer.debt += min(now - max(self._arrived, peer.counted), self._detect_s / 2)
                peer.debt, peer.counted = min(peer.debt, 1.5 * self._detect_s), now

    def closed(self, name: str) -> None:
        """The connection to `name` was closed at its end."""
        self._closed[name] = self._now
        if (peer := self._peers.get(name)) is not None:
            peer.closed = True

    def tick(self, now: float, mine: int | None, fenced: bool = False) -> list[tuple[str, float]]:
        """Time passes. Returns members that have become slow, and for how long they were waited for.

        A member is slow that is waited for `detect_s` without a break; or in each of many steps, for more than a fifth
        of the time, until that makes `detect_s`.

        Args:
            now: the clock.
            mine: the `place` of this member; None if it does not train and so waits for nobody.
            fenced: nobody goes on while an epoch is being decided, so waiting is not counted.
        """
        if now - self._now > self._detect_s / 2:
            # This process was stopped itself. What the others have sent meanwhile has yet to be read.
            for peer in self._peers.values():
                peer.heard, peer.waited_since = now, math.inf
        passed, self._now = max(now - self._now, 0.0), max(now, self._now)
        if mine != self._mine:
            # Who goes on was not kept waiting, however old the news of the others is.
            self._mine = mine
            for peer in self._peers.values():
                peer.waited_since = math.inf
            self._arrived = self._now if mine is not None and mine % 2 else math.inf
        if fenced:
            self._arrived = math.inf
            return []
        slow: list[tuple[str, float]] = []
        for name, peer in self._peers.items():
            peer.debt = max(peer.debt - _SHARE * passed, 0.0)
            if not peer.trains or not self._owes(peer):
                peer.waited_since = math.inf
                peer.told &= peer.debt > 0.0
            elif peer.waited_since == math.inf:
                peer.waited_since = self._now
            waited = max(self._now - peer.waited_since, peer.debt)
            if waited >= self._detect_s and not peer.told:
                peer.told = True
                slow.append((name, waited))
        return slow

    def _owes(self, peer: _Peer) -> bool:
        """Whether this member needs its part. Who waits itself is not to blame, nor is news of an earlier wait."""
        return self._mine is not None and peer.place < self._mine and peer.place % 2 == 0

    def why(self, name: str) -> str:
        """Why `name` is suspected; empty if it is not."""
        peer = self._peers.get(name)
        if peer is None:
            return ""
        if peer.closed:
            return "its connection was closed"
        if self._now - peer.heard > self._detect_s:
            return f"silent for {self._now - peer.heard:.1f} s"
        if self._now - peer.waited_since > self._max_wait_s:
            return f"waited for it for {self._now - peer.waited_since:.1f} s"
        return ""

    @property
    def suspected(self) -> list[str]:
        """Members that are taken for lost."""
        return [name for name in self._peers if self.why(name)]

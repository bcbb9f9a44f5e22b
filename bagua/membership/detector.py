"""Which members are taken for lost: by a closed connection at once, by silence, or (if told so) by slowness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Detector"]


@dataclass
class _Peer:
    heard: float
    trains: bool
    started: int = 0
    closed: bool = False
    waited_since: float = math.inf
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
        self._now = now
        self._started: int | None = None

    def watch(self, trains: Mapping[str, bool]) -> None:
        """Watch these and nobody else, from now on. Those that do not train are not waited for."""
        self._peers = {name: _Peer(self._now, value) for name, value in trains.items()}

    def heard(self, name: str, started: int | None = None) -> None:
        """A message came from `name`. It clears a suspicion of silence, and `started` one of slowness."""
        if (peer := self._peers.get(name)) is not None:
            peer.heard, peer.closed = self._now, False
            if started is not None:
                peer.started = started

    def closed(self, name: str) -> None:
        """The connection to `name` was closed at its end."""
        if (peer := self._peers.get(name)) is not None:
            peer.closed = True

    def tick(self, now: float, started: int | None, fenced: bool = False) -> list[tuple[str, float]]:
        """Time passes. Returns members that have become slow, and since how long.

        Args:
            now: the clock.
            started: steps that this member has begun; None if it does not train and so waits for nobody.
            fenced: nobody goes on while an epoch is being decided, so waiting is not counted.
        """
        if now - self._now > self._detect_s / 2:
            # This process was stopped itself. What the others have sent meanwhile has yet to be read.
            for peer in self._peers.values():
                peer.heard, peer.waited_since = now, math.inf
        self._now = max(now, self._now)
        if started != self._started:
            # Who goes on to the next step was not kept waiting, however old the news of the others is.
            self._started = started
            for peer in self._peers.values():
                peer.waited_since = math.inf
        slow: list[tuple[str, float]] = []
        for name, peer in self._peers.items() if not fenced else ():
            if started is None or not peer.trains or peer.started >= started:
                peer.waited_since, peer.told = math.inf, False
            elif peer.waited_since == math.inf:
                peer.waited_since = self._now
            elif self._now - peer.waited_since >= self._detect_s and not peer.told:
                peer.told = True
                slow.append((name, self._now - peer.waited_since))
        return slow

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

"""Before an epoch that no loss calls for, all ranks rest after the same step: so none is cut short by it."""

from __future__ import annotations

import math
from collections.abc import Collection

__all__ = ["Pause"]

_REACH_S = 4.0  # for the ranks to come to that step; then the epoch is decided all the same
_OTHERS_S = 0.5  # for other hosts to rest, once this one does
_HOLD_S = 1.0  # that ranks rest, if nothing is decided


class Pause:
    """Which step the ranks of this host do not begin for now, and which hosts rest. It changes no verdict but "wait".

    A host that did not hear of it, or is slow, costs the others half a second, and agreement nothing: the epoch is then
    decided in the middle of a step.

    Attributes:
        after: steps after which ranks rest; None: nobody has asked for it in this epoch.
        asker: name of the host that has.
        hosts: that rest.
        seats: ranks of this host that rest.
    """

    def __init__(self) -> None:
        self.after: int | None = None
        self.asker = ""
        self.hosts: set[str] = set()
        self.seats: set[int] = set()
        self._asked, self._since = -math.inf, math.inf

    def ask(self, now: float, asker: str, after: int) -> None:
        """Let the ranks rest; the first to ask in an epoch counts."""
        if self.after is None:
            self.after, self.asker, self._asked = after, asker, now

    def holds(self, now: float, step: int) -> bool:
        """Whether step `step` (0, 1, ...) is not to be begun yet."""
        until = min(self._asked + _REACH_S, self._since) + _HOLD_S
        return self.after is not None and step >= self.after and now < until

    def add(self, now: float, seat: int, seats: Collection[int]) -> bool:
        """A rank rests. True if with it all `seats` of this host do."""
        if self.after is None or seat in self.seats:
            return False
        self.seats.add(seat)
        self._since = min(self._since, now)
        return self.seats >= set(seats)

    def ready(self, name: str, hosts: Collection[str]) -> float:
        """From when on `name` may have the epoch decided, if these hosts train; in the past if they all rest."""
        if self.hosts >= set(hosts):
            return -math.inf
        if self.asker != name:
            return self._asked + _REACH_S + _HOLD_S
        return min(self._asked + _REACH_S, self._since + _OTHERS_S)

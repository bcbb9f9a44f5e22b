"""Watches, on one rank, whether communication has become slower or faster for good."""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["Watch"]

_CHANGE = 1.4  # of the time that exchanges take; a rate that halves or doubles changes it by more, overheads included
_REFERENCE = 8  # steps
_WINDOW = 4
_PAUSE = 50  # steps after a false alarm; doubles with each


class Watch:
    """Compares the time of exchanges in the last steps with that of the first ones after a choice.

    Args:
        period: steps after which the pattern of steps repeats.

    Examples:
        >>> from bagua.auto.watch import Watch
        >>> watch = Watch()
        >>> for seconds in [0.1] * 8 + [0.2] * 4:
        ...     watch.add(seconds)
        >>> watch.suspicion
        1
    """

    def __init__(self, period: int = 1) -> None:
        self._reference: list[float] = []
        self._reference_s: float | None = None
        self._recent: deque[float] = deque(maxlen=max(_WINDOW, period))
        self._size = max(_REFERENCE, period)
        self._pause, self._next_pause = 0, _PAUSE

    def add(self, comm_s: float) -> None:
        """Count a step in which exchanges took `comm_s` seconds."""
        if self._pause:
            self._pause -= 1
        elif self._reference_s is None:
            self._reference.append(comm_s)
            if len(self._reference) == self._size:
                self._reference_s = statistics.median(self._reference)
        else:
            self._recent.append(comm_s)

    @property
    def suspicion(self) -> int:
        """1: all of the last steps were slower; -1: all were faster; 0: neither."""
        if self._reference_s is None or len(self._recent) < (self._recent.maxlen or 0):
            return 0
        if min(self._recent) > _CHANGE * self._reference_s:
            return 1
        return -1 if max(self._recent) < self._reference_s / _CHANGE else 0

    def false_alarm(self) -> None:
        """The links are as before: what is measured from now on is the reference, after a pause."""
        self._reference, self._reference_s = [], None
        self._recent.clear()
        self._pause, self._next_pause = self._next_pause, 2 * self._next_pause

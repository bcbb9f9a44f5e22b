"""Watches, on one rank, whether communication has become slower or faster: by much, or by a little, for good."""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["DRIFT", "Drift", "Watch"]

_CHANGE = 1.4  # of the time that exchanges take; a rate that halves or doubles changes it by more, overheads included
_REFERENCE = 8  # steps
_WINDOW = 4
_PAUSE = 50  # steps after a false alarm; doubles with each
DRIFT = 1.12  # of the time of exchanges: less is noise
_LONG = 12  # steps
_DWELL, _LONGEST_DWELL = 32, 1024  # steps in which a setting stays after a fine step; doubles with each that turns back


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


class Drift:
    """Notices changes too small for `Watch`, and lets fine steps follow each other no faster than they help.

    All of the last twelve steps must differ from the reference. After a fine step, or a look that came to nothing,
    nothing is noticed for a time: 32 steps, doubled with each fine step that turns back the one before. So a rate that
    swings causes one fine step in 32 at first, and ever fewer.

    Args:
        period: steps after which the pattern of steps repeats.

    Examples:
        >>> from bagua.auto.watch import Drift
        >>> drift = Drift()
        >>> for seconds in [0.1] * 32 + [0.12] * 12:
        ...     drift.add(seconds)
        >>> drift.sign, round(drift.ratio, 2)
        (1, 1.2)
    """

    def __init__(self, period: int = 1) -> None:
        self._size = max(_REFERENCE, period)
        self._recent: deque[float] = deque(maxlen=max(_LONG, period))
        self._direction = 0
        self._dwell = self._left = _DWELL
        self._reference: list[float] = []

    def add(self, comm_s: float) -> None:
        """Count a step in which exchanges took `comm_s` seconds."""
        if len(self._reference) < self._size:
            self._reference.append(comm_s)
        self._recent.append(comm_s)
        self._left = max(self._left - 1, 0)

    @property
    def rested(self) -> bool:
        """Whether another fine step may be made."""
        return not self._left

    @property
    def ratio(self) -> float:
        """Time of exchanges now by that at first; 1 where they took none."""
        at_first = statistics.median(self._reference) if self._reference else 0.0
        return statistics.median(self._recent) / at_first if at_first and self._recent else 1.0

    @property
    def sign(self) -> int:
        """1: all of the last steps were slower; -1: all were faster; 0: neither, or it is too early."""
        if self._left or len(self._recent) < (self._recent.maxlen or 0) or len(self._reference) < self._size:
            return 0
        at_first = statistics.median(self._reference)
        if min(self._recent) > DRIFT * at_first:
            return 1
        return -1 if max(self._recent) < at_first / DRIFT else 0

    def rest(self) -> None:
        """A look came to nothing: wait before the next one. The reference stays."""
        self._left = self._dwell

    def forget(self) -> None:
        """Exchanges have changed for another reason than links: what comes now is the reference."""
        self._left = self._dwell
        self._reference = []
        self._recent.clear()

    def stepped(self, direction: int) -> None:
        """A fine step was made, -1 to a coarser setting, 1 to a finer one: what comes now is the reference."""
        turned = direction == -self._direction
        self._dwell = min(2 * self._dwell, _LONGEST_DWELL) if turned else self._dwell
        self._direction = direction
        self.forget()

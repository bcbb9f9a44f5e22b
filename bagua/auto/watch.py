"""Watches, on one rank, whether communication has become slower or faster: by much, or by a little, for good."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection
from itertools import islice

__all__ = ["DRIFT", "SOONEST", "Drift", "Watch"]

# (n, factor): a change is suspected where all of the last n steps differ by the factor. The larger it is, the sooner.
_SIGNS = ((5, 1.4), (8, 1.25))
SOONEST = _SIGNS[0][0]  # steps
_LATEST = _SIGNS[-1][0]
_REFERENCE, _MOST_REFERENCE = 8, 32  # steps
_LEAST_PERIODS = 4  # in a reference, where steps differ within a period
_USUAL = 0.95  # of the steps of the reference: a step is suspect only beyond these
_PAUSE = 50  # steps after a false alarm; doubles with each
DRIFT = 1.12  # of the time of exchanges: less is noise
_LONG = 12  # steps
_DWELL, _LONGEST_DWELL = 32, 1024  # steps in which a setting stays after a fine step; doubles with each that turns back


class Watch:
    """Compares the time of exchanges in the last steps with that of steps after a choice.

    A large change is suspected after five steps, a small one after eight. Each of these steps must also be slower, or
    faster, than 19 of 20 steps of the reference, so that noise that was there before is no sign of a change. The
    reference grows until it has 32 steps. The last eight are never in it, and it does not grow while they drift.

    Args:
        period: steps after which the pattern of steps repeats. Whole periods count as a step does otherwise.

    Examples:
        >>> from bagua.auto.watch import Watch
        >>> watch = Watch()
        >>> for seconds in [0.1] * 8 + [0.15] * 5:
        ...     watch.add(seconds)
        >>> watch.suspicion, watch.lasting
        (1, 5)
    """

    def __init__(self, period: int = 1) -> None:
        self._period = period
        self._begun: list[float] = []  # of a period that has not ended
        self._least = max(math.ceil(_REFERENCE / period), _LEAST_PERIODS)
        self._reference: list[float] = []
        self._recent: deque[float] = deque(maxlen=_LATEST)
        self._pause, self._next_pause = 0, _PAUSE

    def add(self, comm_s: float) -> None:
        """Count a step in which exchanges took `comm_s` seconds."""
        if self._pause:
            self._pause -= 1
            return
        self._begun.append(comm_s)
        if len(self._begun) < self._period:
            return
        mean_s = statistics.fmean(self._begun)
        self._begun = []
        if len(self._reference) < self._least:
            self._reference.append(mean_s)
            return
        if len(self._recent) == _LATEST and len(self._reference) < _MOST_REFERENCE and not self._side(self._recent):
            self._reference.append(self._recent[0])
        self._recent.append(mean_s)

    @property
    def suspicion(self) -> int:
        """1: the last steps were slower; -1: they were faster; 0: neither."""
        if len(self._reference) < self._least:
            return 0
        ranked, typical = sorted(self._reference), statistics.median(self._reference)
        high = ranked[int(_USUAL * len(ranked))]
        low = ranked[len(ranked) - 1 - int(_USUAL * len(ranked))]
        for count, factor in _SIGNS:
            last = list(islice(reversed(self._recent), count))
            if len(last) < count:
                break
            if min(last) > max(factor * typical, high):
                return 1
            if max(last) < min(typical / factor, low):
                return -1
        return 0

    @property
    def lasting(self) -> int:
        """The last steps for which exchanges have been slower, or faster, than the reference; at least 5."""
        count = 0
        if len(self._reference) >= self._least:
            sides = [self._side([seconds]) for seconds in reversed(self._recent)]
            while count < len(sides) and sides[count] == sides[0] != 0:
                count += 1
        return max(count, SOONEST) * self._period

    def _side(self, steps: Collection[float]) -> int:
        """1: the median of `steps` is slower than the reference by a drift; -1: it is faster; 0: neither."""
        typical, now = statistics.median(self._reference), statistics.median(steps)
        return int(now > DRIFT * typical) - int(now < typical / DRIFT)

    def false_alarm(self) -> None:
        """The links are as before: what is measured from now on is the reference, after a pause."""
        self._reference, self._begun = [], []
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

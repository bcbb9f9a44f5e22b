"""Exchanges that fail one after the other."""

from __future__ import annotations

import time

__all__ = ["FailureStreak"]

_MANY = 20


class FailureStreak:
    """Counts failures in a row.

    Args:
        limit_s: a streak is too long if it has at least 20 failures and goes on for more seconds than this. One without
            a failure for as long has ended: of exchanges in the background only failures are known.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._count, self._since, self._last = 0, 0.0, 0.0

    def failed(self) -> None:
        """One more."""
        now = time.monotonic()
        if now - self._last > self._limit_s:
            self.end()
        self._count, self._since, self._last = self._count + 1, self._since or now, now

    def end(self) -> None:
        """An exchange counts, or there is a reason for the failures."""
        self._count, self._since = 0, 0.0

    @property
    def too_long(self) -> bool:
        """Whether it is too long to hope for the next exchange."""
        return self._count >= _MANY and time.monotonic() - self._since > self._limit_s

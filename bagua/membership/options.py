"""Times of the membership protocol."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """How soon members are given up. All in seconds.

    Args:
        detect_s: silence after which a member is taken for lost.
        max_wait_s: how long to wait for a member that answers but does not go on with its step.

    Raises:
        ValueError: names the option that is no such time.
    """

    detect_s: float = 2.0
    max_wait_s: float = math.inf

    def __post_init__(self) -> None:
        if not (self.detect_s > 0 and math.isfinite(self.detect_s)):
            raise ValueError(f"detect_s={self.detect_s}: it must be positive and finite")
        if not self.max_wait_s > self.detect_s:
            raise ValueError(f"max_wait_s={self.max_wait_s}: it must be more than detect_s={self.detect_s}")

    @property
    def beat_s(self) -> float:
        """Between two heartbeats, and between repetitions of a message that has no answer."""
        return self.detect_s / 4

    @property
    def gather_s(self) -> float:
        """How long a proposer that has a quorum waits for the reports of others that it can hear.

        Only a one-way link makes it wait so long: it hears them, but they do not hear it.
        """
        return 2 * self.detect_s

    @property
    def ballot_s(self) -> float:
        """After which a proposer begins again, and others try themselves. At once if the proposer is lost."""
        return 3 * self.detect_s

    @property
    def join_s(self) -> float:
        """How long a request is remembered that is not repeated."""
        return self.detect_s

"""Means of measurements, for scripts of the original that use them. Nothing of this package does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

__all__ = ["StatisticalAverage", "average_by_removing_extreme_values"]

_MAX_SPANS = 4096


def average_by_removing_extreme_values(raw_score_list: Sequence[float]) -> tuple[float, float, list[float]]:
    """Mean, standard deviation and what they are of: the last two thirds, without what is far from their mean.

    Once, and then as long as the deviation is not below the mean (ten times at most), what is a standard deviation
    or more from the mean is left out.

    Raises:
        ValueError: no scores.
    """
    if not raw_score_list:
        raise ValueError("raw_score_list: expected scores, got none")
    kept = [float(score) for score in raw_score_list][len(raw_score_list) // 3 :]
    for _ in range(11):
        mean, deviation = statistics.fmean(kept), statistics.pstdev(kept)
        kept = [score for score in kept if abs(score - mean) < deviation] or kept
        if statistics.pstdev(kept) < statistics.fmean(kept):
            break
    return statistics.fmean(kept), statistics.pstdev(kept), kept


class StatisticalAverage:
    """The mean over time of a value that is recorded now and then; each holds for the time since the one before.

    Args:
        last_update_time: when it begins, as `time.time()` has it; None is now.
        records: means of the last 1, 2, 4, ... seconds up to there, to begin with.
        record_tail: seconds before those, and the mean of both together.

    Differs: the original keeps means of 1, 2, 4, ... seconds and interpolates; here they are exact, of the last
    4096 values.
    """

    def __init__(
        self,
        last_update_time: float | None = None,
        records: Sequence[float] = (),
        record_tail: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.last_update_time = time.time() if last_update_time is None else last_update_time
        self._spans: list[tuple[float, float]] = []  # seconds and value, the newest last
        means = [(2.0**power, mean) for power, mean in enumerate(records)]
        if record_tail[0] > 0:
            means.append(((means[-1][0] if means else 0.0) + record_tail[0], record_tail[1]))
        before, total = 0.0, 0.0
        for seconds, mean in means:
            part = seconds - before
            self._spans.insert(0, (part, (mean * seconds - total) / part))
            before, total = seconds, mean * seconds

    def record(self, val: float) -> None:
        """`val` held since the last call."""
        now = time.time()
        self._spans.append((max(now - self.last_update_time, 0.0), float(val)))
        del self._spans[:-_MAX_SPANS]
        self.last_update_time = now

    def total_recording_time(self) -> float:
        """Seconds that records cover."""
        return sum(seconds for seconds, _ in self._spans)

    def get_records_mean(self, last_n_seconds: float) -> float:
        """Mean of the last seconds up to the newest record; 0 without any."""
        left, total, covered = last_n_seconds, 0.0, 0.0
        for seconds, value in reversed(self._spans):
            part = min(seconds, left)
            total, covered, left = total + part * value, covered + part, left - part
            if left <= 0:
                break
        if covered > 0:
            return total / covered
        return self._spans[-1][1] if self._spans and last_n_seconds > 0 else 0.0

    def get(self, last_n_seconds: float) -> float:
        """Mean of the last seconds up to now; the newest value where no record is within them."""
        since = time.time() - self.last_update_time
        if last_n_seconds <= since:
            return self._spans[-1][1] if self._spans else 0.0
        return self.get_records_mean(last_n_seconds - since)

    def __str__(self) -> str:
        return f"StatisticalAverage of {len(self._spans)} records over {self.total_recording_time():.3f} s"

"""The candidates in the order of their predicted steps, and which of them may not be taken."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bagua.auto.candidates import Candidate
from bagua.auto.facts import Facts, StepTimes
from bagua.auto.loss_gaps import gap_of
from bagua.plan import CPU, GPU, Workload, predict

__all__ = ["ALIKE", "MARGIN", "Ranking"]

MARGIN = 0.05  # by which a setting must beat full precision, predicted and measured
ALIKE = 0.03  # settings within this of the fastest count as equally fast: the one that learns best is taken
_OF_A_KIND = 2  # settings that differ in bits or rank alone, among those tried


class Ranking:
    """Predictions for the candidates of `facts`.

    Attributes:
        facts: what it goes by.
        limits: largest loss gap of each candidate, as a fraction.
        gaps: as measured; None where it was not, with this family of optimizers. On a ladder at most that of a coarser
            setting: a finer one learns no worse, so what is larger is noise.
        predicted: seconds of a step; None where the simulation cannot tell.
        barred: why a candidate may not be taken, by position; for good.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.limits = [facts.auto.limit(each.kind) for each in facts.candidates]
        self.gaps = _bounded(facts.candidates, [gap_of(each.row, facts.families) for each in facts.candidates])
        self.predicted: list[float | None] = [None] * len(facts.candidates)
        self.barred: dict[int, str] = {}
        self._workload: Workload | None = None

    def know(self, rank: Sequence[StepTimes], compute_s: float) -> None:
        """Predict, from steps in full precision of the rank that computes longest."""
        forward_s = statistics.median(each.forward_s for each in rank)
        optimizer_s = statistics.median(each.optimizer_s for each in rank)
        passes_s = max(compute_s - optimizer_s, 0.0)
        self._workload = Workload(self.facts.model, passes_s, min(forward_s, passes_s), optimizer_s)
        self.predict()

    def predict(self) -> None:
        """Predict a step of each candidate over the links of `facts`."""
        self.predicted = [self.step_s(position) for position in range(len(self.facts.candidates))]

    def step_s(self, position: int, slower: float = 1.0) -> float | None:
        """Seconds of a step, on links with one `slower`-th of the measured rate; None if the simulation cannot tell."""
        assert self._workload is not None
        costs, cluster = GPU if self.facts.gpu else CPU, self.facts.cluster_at(1 / slower)
        try:
            return predict(self.facts.candidates[position].name, self._workload, cluster, costs).step_s
        except ValueError:
            return None

    def exclude(self) -> None:
        """Bar what learns too badly."""
        for position, (gap, limit) in enumerate(zip(self.gaps, self.limits, strict=True)):
            if gap is None and limit < math.inf:
                self.barred.setdefault(position, "loss not measured with this optimizer")
            elif gap is not None and gap > limit:
                self.barred.setdefault(position, f"learns worse than the limit of {100 * limit:.1f} %")

    def promising(self, bar_s: float, besides: int = 0) -> list[tuple[float, int]]:
        """Predictions below `bar_s` of what is not barred or exact, with their positions.

        The fastest first; of those that are as good as fastest, the one that learns best.
        """
        found = sorted(
            (predicted, position)
            for position, predicted in enumerate(self.predicted)
            if position not in (0, besides) and position not in self.barred
            if predicted is not None and predicted < bar_s
        )
        alike = [each for each in found if each[0] <= (1 + ALIKE) * found[0][0]]
        return sorted(alike, key=lambda each: (*self.learns(each[1]), each[0])) + found[len(alike) :]

    def learns(self, position: int) -> tuple[float, int]:
        """Lower is better: the loss gap, of which less than 0.1 % is noise, then the precision."""
        return round(self.gaps[position] or 0.0, 3), -self.facts.candidates[position].rung

    def varied(self, positions: Sequence[int]) -> list[int]:
        """Without the third of a kind and those after it: they would differ least."""
        kinds = [self.facts.candidates[position].alike for position in positions]
        return [
            position
            for number, position in enumerate(positions)
            if not kinds[number] or kinds[:number].count(kinds[number]) < _OF_A_KIND
        ]

    def neighbours(self, position: int) -> tuple[int | None, int | None]:
        """The next coarser and the next finer candidate of the same ladder that may be taken."""
        candidates = self.facts.candidates
        here = candidates[position]
        others = sorted(
            (each.rung, other)
            for other, each in enumerate(candidates)
            if here.ladder and each.ladder == here.ladder and other not in self.barred
        )
        coarser = [other for rung, other in others if rung < here.rung]
        finer = [other for rung, other in others if rung > here.rung]
        return coarser[-1] if coarser else None, finer[0] if finer else None


def _bounded(candidates: Sequence[Candidate], measured: Sequence[float | None]) -> list[float | None]:
    """Of a ladder, no gap is larger than one of a coarser setting."""
    found = list(measured)
    for position, (here, own) in enumerate(zip(candidates, measured, strict=True)):
        if here.ladder and own is not None:
            on_it = [each.ladder == here.ladder and each.rung < here.rung for each in candidates]
            coarser = [gap for gap, counts in zip(measured, on_it, strict=True) if counts and gap is not None]
            found[position] = min([own, *coarser])
    return found

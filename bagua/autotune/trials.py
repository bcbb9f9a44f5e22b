"""The trials so far: which settings were measured, and what came of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable
from dataclasses import dataclass, field

from bagua.autotune.settings import Settings
from bagua.autotune.space import Space

__all__ = ["Sample", "Trials"]


@dataclass
class Sample:
    """One setting that was tried.

    Attributes:
        turns_s: seconds a step, one value for each turn.
        problem: why it could not be set up; empty if it could.
    """

    settings: Settings
    turns_s: list[float] = field(default_factory=list)
    problem: str = ""

    @property
    def score_s(self) -> float:
        """Median of the turns, the lower one of two: what disturbs a step makes it longer. Infinite if it failed."""
        return statistics.median_low(self.turns_s) if self.turns_s and not self.problem else math.inf


class Trials:
    """History of trials: samples by the effect of their settings."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._samples: dict[Hashable, Sample] = {}

    def sample(self, settings: Settings) -> Sample:
        """The sample of `settings`, or of others that come to the same; made if there is none."""
        return self._samples.setdefault(self._space.effect(settings), Sample(settings))

    def known(self, settings: Settings) -> bool:
        """Whether it was tried."""
        return self._space.effect(settings) in self._samples

    def score_s(self, settings: Settings) -> float:
        """Seconds a step; infinite if it failed or was not tried."""
        found = self._samples.get(self._space.effect(settings))
        return math.inf if found is None else found.score_s

    @property
    def samples(self) -> list[Sample]:
        """All, in the order in which they were first tried."""
        return list(self._samples.values())

    def ranking(self) -> list[Sample]:
        """Those that could be set up, the fastest first."""
        return sorted((each for each in self.samples if each.score_s < math.inf), key=lambda each: each.score_s)

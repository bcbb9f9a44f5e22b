"""Rank 0's part: what to try next, what came of it, and what to keep. Knows of no ranks, modules or networks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bagua.autotune.options import Autotune
from bagua.autotune.settings import Settings
from bagua.autotune.space import Space
from bagua.autotune.strategies import STRATEGIES, Trial
from bagua.autotune.trials import Trials

__all__ = ["Measurement", "Order", "Outcome", "Tuner"]

_BAD = 1.03  # times the best: settings so slow are not measured any further
_WORTH = 0.02  # by which the winner must beat the default in the final comparison
_FINALISTS = 2  # beside the default
_FINAL_TURNS, _FINAL_ROUNDS = 2, 3
_FINALE = (_FINALISTS + 1) * (1 + _FINAL_TURNS)  # turns of one round
_MOST_STEPS = 1000  # of a turn


class Order(NamedTuple):
    """What all ranks do next: train so many steps with these settings, or, if 0, tune no more and keep them."""

    settings: Settings
    num_steps: int


class Outcome(NamedTuple):
    """What came of an order.

    Attributes:
        ranks_s: seconds of each step, by rank; ranks that could not tell leave it empty.
        problem: why the settings could not be set up on some rank, after which all are back at those of before.
    """

    ranks_s: Sequence[Sequence[float]]
    problem: str = ""


@dataclass(frozen=True)
class Measurement:
    """One line of the log.

    Attributes:
        step_s: seconds a step; None if the settings could not be set up.
        phase: "warm-up", "search" or "final".
        used: whether it counts; the turn made to get used to a setting does not.
        num_steps: made for it.
        problem: see `Outcome`.
    """

    settings: Settings
    step_s: float | None
    phase: str
    used: bool
    num_steps: int
    problem: str = ""


Course = Generator[Order, Outcome, None]


class Tuner:
    """Gives orders and takes outcomes: `begin`, then `next` until an order has no steps.

    Args:
        period: steps after which the pattern of steps repeats; turns are made of whole periods.
        told: called with each measurement.

    Attributes:
        phase: "warm-up", "search", "final" or "done".
        num_steps: ordered so far.
        best: the settings kept, once done.
        default_s, best_s: seconds a step, the last that is known; None before.
    """

    def __init__(
        self,
        options: Autotune,
        space: Space,
        period: int = 1,
        told: Callable[[Measurement], object] = lambda measurement: None,
    ) -> None:
        self.trials = Trials(space)
        self.phase = "warm-up"
        self.num_steps = 0
        self.best = space.default
        self.default_s: float | None = None
        self.best_s: float | None = None
        self._options, self._space, self._period, self._told = options, space, period, told
        self._turn_steps = period
        self._turns_left = options.max_turns
        self._active = space.default
        self._course = self._run()

    @property
    def axes(self) -> tuple[str, ...]:
        """What is tuned."""
        return tuple(self._space.axes)

    def begin(self) -> Order:
        """The first order."""
        return self._count(next(self._course))

    def next(self, outcome: Outcome) -> Order:
        """The order that follows from `outcome`."""
        try:
            return self._count(self._course.send(outcome))
        except StopIteration:
            self.phase = "done"
            return Order(self.best, 0)

    def _count(self, order: Order) -> Order:
        self.num_steps += order.num_steps
        return order

    # -- the course of things ------------------------------------------------------------------------------------

    def _run(self) -> Course:
        yield from self._warm_up()
        self.phase = "search"
        for trial in STRATEGIES[self._options.search](self._space, self.trials):
            new = not self.trials.known(trial.settings)
            if self._turns_left < _FINALE + trial.more_turns + 1:
                break
            if new and len(self.trials.samples) >= self._options.max_samples:
                break
            yield from self._try(trial)
        self.phase = "final"
        yield from self._finale()

    def _warm_up(self) -> Course:
        """Train with the defaults until caches, connections and clocks are warm; learn how long a step takes."""
        seconds, step_s = 0.0, 0.0
        while True:
            outcome = yield Order(self._active, self._turn_steps)
            step_s = self._step_s(outcome)
            self._tell(self._active, step_s, False, self._turn_steps)
            seconds += step_s * self._turn_steps
            if seconds >= self._options.warmup_time_s:
                break
        wanted = self._options.sampling_confidence_time_s / step_s if step_s > 0 else 1.0
        periods = math.ceil(min(wanted, _MOST_STEPS) / self._period)
        self._turn_steps = self._period * max(1, periods)

    def _try(self, trial: Trial) -> Course:
        """Measure until it is clear that the settings are not among the best."""
        sample, best_s = self.trials.sample(trial.settings), self._best_s()
        for _ in range(1 + trial.more_turns):
            measured = yield from self._turn(trial.settings, True)
            if measured is None:
                return
            sample.turns_s.append(measured)
            if sample.score_s > _BAD * best_s:
                return

    def _turn(self, settings: Settings, used: bool) -> Generator[Order, Outcome, float | None]:
        """One turn; None if the settings could not be set up. The turns made before a measurement are short."""
        num_steps = self._turn_steps if used else self._period
        outcome = yield Order(settings, num_steps)
        self._turns_left -= 1
        if outcome.problem:
            self.trials.sample(settings).problem = outcome.problem
            self._tell(settings, None, False, 0, outcome.problem)
            self.num_steps -= num_steps  # none was made
            return None
        self._active = settings
        step_s = self._step_s(outcome)
        self._tell(settings, step_s, used, num_steps)
        return step_s

    def _finale(self) -> Course:
        """Measure the fastest beside the default again. What was best in the search may have been lucky."""
        default = self._space.default
        same = self._space.effect(default)
        ranked = [each.settings for each in self.trials.ranking() if self._space.effect(each.settings) != same]
        finalists = ranked[:_FINALISTS]
        turns_s: dict[Settings, list[float]] = {each: [] for each in (*finalists, default)}
        for number in range(_FINAL_ROUNDS if finalists else 0):
            if number and self._turns_left < len(turns_s) * (1 + _FINAL_TURNS):
                break
            for settings in sorted(turns_s, key=lambda each: each != self._active):
                yield from self._measure_again(settings, turns_s)
        scores = {each: statistics.median(values) for each, values in turns_s.items() if values}
        self.default_s = scores.get(default, self.trials.score_s(default))
        self.best = min(scores, key=lambda each: scores[each], default=default)
        if self.best != default and scores[self.best] > (1 - _WORTH) * self.default_s:
            self.best = default
        self.best_s = scores.get(self.best, self.default_s)

    def _measure_again(self, settings: Settings, turns_s: dict[Settings, list[float]]) -> Course:
        if settings != self._active and (yield from self._turn(settings, False)) is None:
            turns_s[settings].clear()
            return
        for _ in range(_FINAL_TURNS):
            measured = yield from self._turn(settings, True)
            if measured is not None:
                turns_s[settings].append(measured)

    # -- arithmetic ----------------------------------------------------------------------------------------------

    def _step_s(self, outcome: Outcome) -> float:
        """Seconds a step: a step is over when the slowest rank is; one that is interrupted now and then counts little.

        Within a period steps differ by design, so that only their mean means anything.
        """
        steps_s = [max(each) for each in zip(*(ranks for ranks in outcome.ranks_s if ranks), strict=False)]
        if not steps_s:
            return math.inf
        return statistics.median(steps_s) if self._period == 1 else statistics.fmean(steps_s)

    def _best_s(self) -> float:
        ranking = self.trials.ranking()
        return ranking[0].score_s if ranking else math.inf

    def _tell(self, settings: Settings, step_s: float | None, used: bool, num_steps: int, problem: str = "") -> None:
        ranking = self.trials.ranking()
        if ranking:
            self.best, self.best_s = ranking[0].settings, ranking[0].score_s
        self._told(Measurement(settings, step_s, self.phase, used, num_steps, problem))

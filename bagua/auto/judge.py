"""The decisions of a choice, on rank 0, without engine and network: what to try next, and what stays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bagua.auto.candidates import NEED_OPTIMIZER
from bagua.auto.explanation import Explanation, Row, describe_rate
from bagua.auto.facts import Facts, StepTimes
from bagua.auto.links import Links
from bagua.auto.ranking import ALIKE, MARGIN, Ranking
from bagua.auto.watch import DRIFT
from bagua.engine import Quality

__all__ = ["Judge", "Order", "Outcome"]

_FINALISTS, _FINALISTS_AGAIN = 3, 2
_MOST_TRIAL_STEPS = 31  # with those in full precision fewer than 40
_SKIPPED_AT_FIRST, _MEASURED_AT_FIRST = 2, 4
_MEASURED, _MEASURED_AGAIN = 4, 3
_MOST_ERROR = 0.5  # of the mean, without error feedback
_LEAST_COSINE = 0.05  # with it, as `bagua.Guard`
_MOST_CONSENSUS = 0.1


@dataclass(frozen=True)
class Order:
    """What all ranks do next.

    Attributes:
        candidate: position among the candidates.
        skip: steps that are not measured.
        count: steps that are measured then; 0: it stays.
        quality: whether to measure the compression error in the first step.
    """

    candidate: int
    skip: int = 0
    count: int = 0
    quality: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of an order.

    Attributes:
        ranks: measured steps of each rank.
        step: training steps completed.
        excluded: why a candidate cannot be taken, by position; of all ranks.
        quality: compression error, if it was measured.
        problem: why the candidate could not be set up.
    """

    ranks: Sequence[Sequence[StepTimes]] = ()
    step: int = 0
    excluded: Mapping[int, str] = field(default_factory=dict)
    quality: Quality | None = None
    problem: str = ""


class Judge:
    """Rank 0's part of a choice. `begin` and `next` return what all ranks do.

    Attributes:
        explanation: of the state of the choice.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._ranking = Ranking(facts)
        self._measured: dict[int, float] = {}
        self._samples: dict[int, list[list[StepTimes]]] = {}  # of each rank, all trials together
        self._trial_steps = 0
        self._judged: set[int] = set()  # whose compression error is known: it is the gradients', not the links'
        self._run_off = False
        self._fastest_exact_s = math.inf
        self._compute_s = self._exposed_s = 0.0
        self._order = Order(0)
        self._left: list[int] = []
        self._slower = 1.0  # than measured, as far as fine steps know
        self._refined: tuple[int, float] | None = None  # what was left in a fine step, and its seconds of a step
        self._current: int | None = None  # what ran until the links changed
        self._changed = ""
        self.explanation = Explanation(
            "measuring",
            facts.candidates[0].name,
            "the first steps measure compute and communication in full precision",
            0,
            facts.auto.allow,
            sum(len(node) for node in facts.nodes),
            links=facts.links,
        )

    def begin(self) -> Order:
        """The first order: steps in full precision."""
        self._order = Order(0, _SKIPPED_AT_FIRST, _MEASURED_AT_FIRST)
        return self._order

    def next(self, outcome: Outcome) -> Order:
        """The order after `outcome`, which is that of the order before."""
        position = self._order.candidate
        for each, why in outcome.excluded.items():
            self._ranking.barred.setdefault(each, why)
        if outcome.problem:
            self._ranking.barred[position] = outcome.problem
        else:
            known = self._samples.setdefault(position, [[] for _ in outcome.ranks])
            for before, rank in zip(known, outcome.ranks, strict=True):
                before += rank
            self._measured[position] = _step_s(known, self._facts.candidates[position].period)
            self._judge_quality(position, outcome.quality)
        if position == 0 and not outcome.problem:
            self._fastest_exact_s = max(min(each.step_s for each in rank) for rank in self._samples[0])
            if self._current is None and not self._run_off:
                self._after_exact(outcome)
        return self._go_on(outcome.step)

    def again(self, links: Links, step: int, current_s: float) -> Order:
        """The order after the links have changed, while the last choice runs on with `current_s` seconds a step.

        Compute is taken to be as before. Up to two settings are tried, and full precision if they would not gain.
        """
        now, before = links.ring_bandwidth, self._facts.links.ring_bandwidth
        self._changed = f"links changed from {describe_rate(before)} to {describe_rate(now)}: "
        self._facts = self._ranking.facts = replace(self._facts, links=links)
        self.explanation = replace(self.explanation, links=links)
        current = self._current = self._order.candidate
        self._slower, self._refined = 1.0, None
        self._samples = {}
        self._measured = {current: current_s}
        self._fastest_exact_s = math.inf  # that was over the links of before
        self._ranking.predict()
        own = self._ranking.predicted[current]
        bar_s = math.inf if own is None else (1 - MARGIN) * own
        exact_s, promising = self._ranking.predicted[0], self._ranking.promising(bar_s, besides=current)
        finalists = self._ranking.varied([position for _, position in promising])[:_FINALISTS_AGAIN]
        least_s = min([own or math.inf, *(predicted for predicted, _ in promising)])
        if current and exact_s is not None and (1 - MARGIN) * exact_s <= least_s:
            finalists = [0, *finalists[: _FINALISTS_AGAIN - 1]]
        self._left = finalists
        return self._go_on(step)

    def refine(self, slower: float, step: int, current_s: float) -> Order:
        """A setting finer or coarser by one rung, or the one in force, after exchanges have changed a little.

        There is no trial: predictions decide, and what the step before this one has brought.

        Args:
            slower: time of exchanges by that at the last choice; below 1 if they are faster.
            step: training steps completed.
            current_s: seconds of a step now.
        """
        current, before = self._order.candidate, self._refined
        coarser, finer = self._ranking.neighbours(current)
        own_s = self._ranking.step_s(current, self._slower * slower)
        chosen, why = current, ""
        # Steps that became longer with the links say nothing against a coarser setting.
        comparable = before is not None and (before[0] == coarser or (before[0] == finer and slower < DRIFT))
        if before is not None and comparable and current_s > (1 + MARGIN) * before[1]:
            chosen, why = before[0], f"steps took {1e3 * before[1]:.1f} ms with it, and {1e3 * current_s:.1f} ms since"
        elif own_s is not None and slower >= DRIFT and coarser is not None:
            there_s = self._ranking.step_s(coarser, self._slower * slower)
            if there_s is not None and there_s < (1 - MARGIN) * own_s:
                chosen, why = coarser, f"exchanges take {slower:.2f} times as long"
        elif own_s is not None and slower <= 1 / DRIFT and finer is not None:
            there_s = self._ranking.step_s(finer, self._slower * slower)
            if there_s is not None and there_s <= (1 + ALIKE) * own_s:
                chosen, why = finer, f"exchanges take {slower:.2f} of their time"
        turns_back = before is not None and chosen == before[0]
        if chosen == current:
            self._refined = None  # what the last fine step brought has been judged
            return self._order
        self._slower *= slower
        self._refined = None if turns_back else (current, current_s)
        self._measured = {current: current_s}
        self._order = Order(chosen)
        names = [self._facts.candidates[each].name for each in (current, chosen)]
        self._explain("settled", names[1], f"{names[1]} instead of {names[0]}, a fine step: {why}.", step)
        return self._order

    # -- ranking -------------------------------------------------------------------------------------------------

    def _after_exact(self, outcome: Outcome) -> None:
        ranks = outcome.ranks
        slowest = max(ranks, key=lambda rank: statistics.median(each.step_s - each.exposed_s for each in rank))
        # The rank that computes longest waits least: its wait is the exchange's, and not that for slower ranks.
        self._compute_s = statistics.median(each.step_s - each.exposed_s for each in slowest)
        self._exposed_s = max(0.0, self._measured[0] - self._compute_s)
        self._ranking.know(slowest, self._compute_s)
        self._ranking.exclude()
        self._left = self._finalists()

    def _finalists(self) -> list[int]:
        """The candidates that are tried, the fastest prediction first."""
        exact = self._ranking.predicted[0] or math.inf
        if self._exposed_s <= MARGIN * self._measured[0]:
            return []
        found: list[int] = []
        for position in self._ranking.varied(
            [position for _, position in self._ranking.promising((1 - MARGIN) * exact)]
        ):
            steps = self._steps_of(position)
            if len(found) < _FINALISTS and self._trial_steps + steps <= _MOST_TRIAL_STEPS:
                found.append(position)
                self._trial_steps += steps
        return found

    def _steps_of(self, position: int) -> int:
        order = self._trial(position)
        return order.skip + order.count

    def _doubtful(self) -> list[int]:
        """The two fastest, if steps of the slower one were faster than steps of the other, and steps are left."""
        ranked = sorted(
            (seconds, each) for each, seconds in self._measured.items() if not each or each not in self._ranking.barred
        )
        if len(ranked) < 2:
            return []
        fast, slow = (position for _, position in ranked[:2])
        if min(_ends(self._samples[slow])) >= max(_ends(self._samples[fast])):
            return []
        steps = self._steps_of(fast) + self._steps_of(slow)
        return [slow, fast] if self._trial_steps + steps <= _MOST_TRIAL_STEPS else []

    def _trial(self, position: int) -> Order:
        candidate = self._facts.candidates[position]
        measured = _MEASURED if self._current is None else _MEASURED_AGAIN
        quality = candidate.kind != "exact" and position not in self._judged
        return Order(position, 1, max(measured, candidate.period), quality=quality)

    def _judge_quality(self, position: int, quality: Quality | None) -> None:
        if quality is None or not position:
            return
        self._judged.add(position)
        candidate = self._facts.candidates[position]
        if quality.consensus > _MOST_CONSENSUS:
            self._ranking.barred[position] = f"weights differ by {100 * quality.consensus:.0f} %"
        elif candidate.feedback and quality.cosine < _LEAST_COSINE:
            self._ranking.barred[position] = f"cosine to the exact mean is {quality.cosine:.2f}"
        elif not candidate.feedback and quality.relative_error > _MOST_ERROR:
            self._ranking.barred[position] = f"error of the mean is {100 * quality.relative_error:.0f} %"

    # -- what is next --------------------------------------------------------------------------------------------

    def _go_on(self, step: int) -> Order:
        if self._left:
            self._order = self._trial(self._left.pop(0))
            trying = self._facts.candidates[self._order.candidate].name
            self._explain("trying", trying, f"{trying} is tried for some steps", step)
            return self._order
        if self._current is None and not self._run_off:
            self._run_off = True
            self._left = self._doubtful()
            if self._left:
                return self._go_on(step)
        chosen = self._best()
        self._order = Order(chosen)
        name = self._facts.candidates[chosen].name
        self._explain("settled", name, self._reason(chosen), step)
        return self._order

    def _best(self) -> int:
        exact_s, current = self._measured.get(0, math.inf), self._current
        bar_s = min((1 - MARGIN) * exact_s, self._fastest_exact_s) if 0 in self._measured else math.inf
        stays = 0 if current is None else current
        if current:  # it stays unless another one beats it clearly, or full precision is as good
            if self._measured[current] >= bar_s or current in self._ranking.barred:
                stays = 0 if 0 in self._measured else stays
            bar_s = min(bar_s, (1 - MARGIN) * self._measured[current])
        found = [
            (seconds, position)
            for position, seconds in self._measured.items()
            if position and position not in self._ranking.barred and seconds < bar_s
        ]
        if not found:
            return stays
        fastest_s = min(found)[0]
        alike = [(seconds, position) for seconds, position in found if seconds <= (1 + ALIKE) * fastest_s]
        return min(alike, key=lambda each: (*self._ranking.learns(each[1]), each[0]))[1]

    def _reason(self, chosen: int) -> str:
        worse = self._faster_but_worse(chosen)
        if 0 not in self._measured:
            return (
                f"{self._changed}{self._facts.candidates[chosen].name} takes {1e3 * self._measured[chosen]:.1f} ms a "
                f"step, and {self._facts.candidates[self._current or 0].name}, which ran before, "
                f"{1e3 * self._measured[self._current or 0]:.1f} ms{worse}."
            )
        exact_s = self._measured[0]
        if chosen:
            gap = self._ranking.gaps[chosen]
            learns = "a loss gap that was not measured" if gap is None else f"a loss gap of {100 * gap:.1f} %"
            chosen_s = self._measured[chosen]
            return (
                f"{self._changed}{self._facts.candidates[chosen].name} takes {1e3 * chosen_s:.1f} ms a step, full "
                f"precision {1e3 * exact_s:.1f} ms ({exact_s / chosen_s:.2f} times as long), with {learns}{worse}."
            )
        if self._current is None and self._exposed_s <= MARGIN * exact_s:
            return (
                f"full precision: only {1e3 * self._exposed_s:.1f} ms of a step of {1e3 * exact_s:.1f} ms wait for "
                f"communication, so that nothing could be faster by {100 * MARGIN:.0f} %{worse}."
            )
        tried = len(self._measured) - 1
        what = f"none of {tried} settings tried" if tried else f'no setting of "{self._facts.auto.allow}"'
        how = "was" if tried else "that learns well enough is predicted to be"
        fastest = f" and than its fastest step, {1e3 * self._fastest_exact_s:.1f} ms" if tried else ""
        return (
            f"{self._changed}full precision: {what} {how} faster by {100 * MARGIN:.0f} % than its "
            f"{1e3 * exact_s:.1f} ms a step{fastest if math.isfinite(self._fastest_exact_s) else ''}{worse}."
        )

    def _faster_but_worse(self, chosen: int) -> str:
        """What would be faster, but learns worse than the limit."""
        least = self._ranking.predicted[chosen]
        found = [
            (predicted, position)
            for position, predicted in enumerate(self._ranking.predicted)
            if predicted is not None and least is not None and predicted < (1 - MARGIN) * least
            if (self._ranking.gaps[position] or 0.0) > self._ranking.limits[position]
        ]
        if not found:
            return ""
        predicted, position = min(found)
        gap = self._ranking.gaps[position] or 0.0
        return (
            f"; {self._facts.candidates[position].name} is predicted at {1e3 * predicted:.1f} ms, but learns worse: "
            f"{100 * gap:.1f} %, with a limit of {100 * self._ranking.limits[position]:.1f} %"
        )

    def _verdict(self, position: int, name: str, settled: bool) -> str:
        if settled and self._facts.candidates[position].name == name:
            return "chosen"
        if position in self._ranking.barred or not settled:
            return self._ranking.barred.get(position, "")
        if position not in self._measured:
            return "not tried"
        least_s = min(
            (seconds for each, seconds in self._measured.items() if self._facts.candidates[each].name == name),
            default=-math.inf,
        )
        return (
            "ran before" if least_s < 0 else "slower" if self._measured[position] >= least_s else "not clearly faster"
        )

    def _explain(self, phase: str, chosen: str, reason: str, step: int) -> None:
        rows = [
            Row(
                each.name,
                each.kind,
                self._ranking.predicted[position],
                self._measured.get(position),
                self._ranking.gaps[position],
                self._verdict(position, name=chosen, settled=phase == "settled"),
            )
            for position, each in enumerate(self._facts.candidates)
        ]
        rows.sort(key=lambda row: (row.measured_s is None, row.measured_s or row.predicted_s or math.inf))
        own = [
            Row(name, "lossy", verdict=f"needs the optimizer {optimizer}")
            for name, optimizer in NEED_OPTIMIZER.items()
            if self._facts.auto.allow != "exact"
        ]
        self.explanation = replace(
            self.explanation,
            phase=phase,
            chosen=chosen,
            reason=reason,
            step=step,
            compute_s=self._compute_s,
            exposed_s=self._exposed_s,
            rows=(*rows, *own),
        )


def _ends(ranks: Sequence[Sequence[StepTimes]]) -> list[float]:
    """Seconds of each step, which is over when the slowest rank is."""
    return [max(each.step_s for each in steps) for steps in zip(*ranks, strict=True)]


def _step_s(ranks: Sequence[Sequence[StepTimes]], period: int) -> float:
    """Of the slowest rank: the median, or the mean where steps differ."""
    typical = statistics.median if period == 1 else statistics.fmean
    return max(typical([each.step_s for each in rank]) for rank in ranks)

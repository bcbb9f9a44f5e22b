"""The decisions of a choice, on rank 0, without engine and network: what to try next, and what stays."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bagua.algorithms.auto import Auto
from bagua.auto.candidates import NEED_OPTIMIZER, Candidate
from bagua.auto.explanation import Explanation, Row, describe_rate
from bagua.auto.links import Links
from bagua.auto.loss_gaps import gap_of
from bagua.bench.models import Layer, Model
from bagua.engine import Quality
from bagua.plan import CPU, GPU, Cluster, Workload, predict

__all__ = ["MARGIN", "Facts", "Judge", "Order", "Outcome", "StepTimes"]

MARGIN = 0.05  # by which a setting must beat full precision, predicted and measured
_ALIKE = 0.03  # settings within this of the fastest count as equally fast: the one that learns best is taken
_FINALISTS, _FINALISTS_AGAIN = 3, 2
_MOST_TRIAL_STEPS = 31  # with those in full precision fewer than 40
_SKIPPED_AT_FIRST, _MEASURED_AT_FIRST = 2, 4
_MEASURED = 4
_MOST_ERROR = 0.5  # of the mean, without error feedback
_LEAST_COSINE = 0.05  # with it, as `bagua.Guard`
_MOST_CONSENSUS = 0.1


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on one rank.

    Attributes:
        step_s: from the first forward pass to the end of the optimizer's step.
        exposed_s: of it, waiting for communication.
        forward_s: until the synchronised backward pass.
        optimizer_s: the optimizer's step.
    """

    step_s: float
    exposed_s: float
    forward_s: float
    optimizer_s: float


@dataclass(frozen=True)
class Facts:
    """What does not change while candidates are tried.

    Attributes:
        auto: the user's options.
        nodes: ranks by node.
        candidates: all of the allowed classes; the first one is exact.
        links: as measured.
        shapes: of parameters, in the order of the forward pass.
        families: of the optimizers.
        cores: of the CPU, that a rank has.
        gpu: ranks train on GPUs.
    """

    auto: Auto
    nodes: tuple[tuple[int, ...], ...]
    candidates: tuple[Candidate, ...]
    links: Links
    shapes: Mapping[str, tuple[int, ...]]
    families: tuple[str, ...]
    cores: float
    gpu: bool = False

    @property
    def cluster(self) -> Cluster:
        """Nodes and links, for the simulation."""
        links, hosts = self.links, len(self.nodes)
        within = Links(links.within, (), 0.0) if links.within else None
        return Cluster(
            hosts=hosts,
            devices=max(len(node) for node in self.nodes),
            bandwidth=links.bandwidth if hosts > 1 else math.inf,
            latency=links.latency_s if hosts > 1 else 0.0,
            inner_bandwidth=within.bandwidth if within is not None else math.inf,
            inner_latency=within.latency_s if within is not None else 0.0,
            cores=max(self.cores, 0.25),
        )

    @property
    def model(self) -> Model:
        """Parameters by the module that holds them; arithmetic in proportion to their number."""
        layers: list[Layer] = []
        for owner, names in itertools.groupby(self.shapes, key=lambda name: name.rpartition(".")[0]):
            shapes = tuple(self.shapes[name] for name in names)
            layers.append(Layer(owner or "module", shapes, max(1, sum(math.prod(shape) for shape in shapes))))
        return Model("module", tuple(layers))


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
        self._limits = [facts.auto.limit(each.kind) for each in facts.candidates]
        self._gaps = [gap_of(each.row, facts.families) for each in facts.candidates]
        self._predicted: list[float | None] = [None] * len(facts.candidates)
        self._measured: dict[int, float] = {}
        self._barred: dict[int, str] = {}  # for good
        self._fastest_exact_s = math.inf
        self._compute_s = self._exposed_s = 0.0
        self._order = Order(0)
        self._left: list[int] = []
        self._slowest: Sequence[StepTimes] = ()
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
            self._barred.setdefault(each, why)
        if outcome.problem:
            self._barred[position] = outcome.problem
        else:
            self._measured[position] = _step_s(outcome.ranks, self._facts.candidates[position].period)
            self._judge_quality(position, outcome.quality)
        if position == 0 and self._current is None:
            self._after_exact(outcome)
        elif position == 0 and not outcome.problem:
            self._fastest_exact_s = max(min(each.step_s for each in rank) for rank in outcome.ranks)
        return self._go_on(outcome.step)

    def again(self, links: Links, step: int, current_s: float) -> Order:
        """The order after the links have changed, while the last choice runs on with `current_s` seconds a step.

        Compute is taken to be as before. Up to two settings are tried, and full precision if they would not gain.
        """
        now, before = links.bandwidth, self._facts.links.bandwidth
        self._changed = f"links changed from {describe_rate(before)} to {describe_rate(now)}: "
        self._facts = replace(self._facts, links=links)
        self.explanation = replace(self.explanation, links=links)
        current = self._current = self._order.candidate
        self._measured = {current: current_s}
        self._fastest_exact_s = math.inf  # that was over the links of before
        self._predict()
        own = self._predicted[current]
        bar_s = math.inf if own is None else (1 - MARGIN) * own
        exact_s, promising = self._predicted[0], self._promising(bar_s, besides=current)
        finalists = [position for _, position in promising[:_FINALISTS_AGAIN]]
        least_s = min([own or math.inf, *(predicted for predicted, _ in promising)])
        if current and exact_s is not None and (1 - MARGIN) * exact_s <= least_s:
            finalists = [0, *finalists[: _FINALISTS_AGAIN - 1]]
        self._left = finalists
        return self._go_on(step)

    # -- ranking -------------------------------------------------------------------------------------------------

    def _after_exact(self, outcome: Outcome) -> None:
        ranks = outcome.ranks
        self._fastest_exact_s = max(min(each.step_s for each in rank) for rank in ranks)
        slowest = max(ranks, key=lambda rank: statistics.median(each.step_s - each.exposed_s for each in rank))
        # The rank that computes longest waits least: its wait is the exchange's, and not that for slower ranks.
        self._compute_s = statistics.median(each.step_s - each.exposed_s for each in slowest)
        self._exposed_s = max(0.0, self._measured[0] - self._compute_s)
        self._slowest = slowest
        self._predict()
        self._exclude()
        self._left = self._finalists()

    def _predict(self) -> None:
        rank = self._slowest
        forward_s = statistics.median(each.forward_s for each in rank)
        optimizer_s = statistics.median(each.optimizer_s for each in rank)
        passes_s = max(self._compute_s - optimizer_s, 0.0)
        workload = Workload(self._facts.model, passes_s, min(forward_s, passes_s), optimizer_s)
        costs, cluster = GPU if self._facts.gpu else CPU, self._facts.cluster
        for position, each in enumerate(self._facts.candidates):
            try:
                self._predicted[position] = predict(each.name, workload, cluster, costs).step_s
            except ValueError:  # the simulation does not know its course
                self._predicted[position] = None

    def _exclude(self) -> None:
        for position, (gap, limit) in enumerate(zip(self._gaps, self._limits, strict=True)):
            if gap is None and limit < math.inf:
                self._barred.setdefault(position, "loss not measured with this optimizer")
            elif gap is not None and gap > limit:
                text = f"learns worse than the limit of {100 * limit:.1f} %"
                self._barred.setdefault(position, text)

    def _finalists(self) -> list[int]:
        """The candidates that are tried, the fastest prediction first."""
        exact = self._predicted[0] or math.inf
        if self._exposed_s <= MARGIN * self._measured[0]:
            return []
        found: list[int] = []
        steps = 0
        for _, position in self._promising((1 - MARGIN) * exact):
            order = self._trial(position)
            if len(found) < _FINALISTS and steps + order.skip + order.count <= _MOST_TRIAL_STEPS:
                found.append(position)
                steps += order.skip + order.count
        return found

    def _promising(self, bar_s: float, besides: int = 0) -> list[tuple[float, int]]:
        """Predictions below `bar_s` of what is not barred or exact, the fastest first, with their positions."""
        return sorted(
            (predicted, position)
            for position, predicted in enumerate(self._predicted)
            if position not in (0, besides) and position not in self._barred
            if predicted is not None and predicted < bar_s
        )

    def _trial(self, position: int) -> Order:
        candidate = self._facts.candidates[position]
        return Order(position, 1, max(_MEASURED, candidate.period), quality=candidate.kind != "exact")

    def _judge_quality(self, position: int, quality: Quality | None) -> None:
        if quality is None or not position:
            return
        candidate = self._facts.candidates[position]
        if quality.consensus > _MOST_CONSENSUS:
            self._barred[position] = f"weights differ by {100 * quality.consensus:.0f} %"
        elif candidate.feedback and quality.cosine < _LEAST_COSINE:
            self._barred[position] = f"cosine to the exact mean is {quality.cosine:.2f}"
        elif not candidate.feedback and quality.relative_error > _MOST_ERROR:
            self._barred[position] = f"error of the mean is {100 * quality.relative_error:.0f} %"

    # -- what is next --------------------------------------------------------------------------------------------

    def _go_on(self, step: int) -> Order:
        if self._left:
            self._order = self._trial(self._left.pop(0))
            trying = self._facts.candidates[self._order.candidate].name
            self._explain("trying", trying, f"{trying} is tried for some steps", step)
            return self._order
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
            if self._measured[current] >= bar_s or current in self._barred:
                stays = 0 if 0 in self._measured else stays
            bar_s = min(bar_s, (1 - MARGIN) * self._measured[current])
        found = [
            (seconds, position)
            for position, seconds in self._measured.items()
            if position and position not in self._barred and seconds < bar_s
        ]
        if not found:
            return stays
        fastest_s = min(found)[0]
        alike = [(seconds, position) for seconds, position in found if seconds <= (1 + _ALIKE) * fastest_s]
        return min(alike, key=lambda each: (self._gaps[each[1]] or 0.0, each[0]))[1]

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
            gap = self._gaps[chosen]
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
        least = self._predicted[chosen]
        found = [
            (predicted, position)
            for position, predicted in enumerate(self._predicted)
            if predicted is not None and least is not None and predicted < (1 - MARGIN) * least
            if (self._gaps[position] or 0.0) > self._limits[position]
        ]
        if not found:
            return ""
        predicted, position = min(found)
        gap = self._gaps[position] or 0.0
        return (
            f"; {self._facts.candidates[position].name} is predicted at {1e3 * predicted:.1f} ms, but learns worse: "
            f"{100 * gap:.1f} %, with a limit of {100 * self._limits[position]:.1f} %"
        )

    def _verdict(self, position: int, name: str, settled: bool) -> str:
        if settled and self._facts.candidates[position].name == name:
            return "chosen"
        if position in self._barred or not settled:
            return self._barred.get(position, "")
        if position not in self._measured:
            return "not tried"
        least_s = min(seconds for each, seconds in self._measured.items() if self._facts.candidates[each].name == name)
        return "slower" if self._measured[position] >= least_s else "not clearly faster"

    def _explain(self, phase: str, chosen: str, reason: str, step: int) -> None:
        rows = [
            Row(
                each.name,
                each.kind,
                self._predicted[position],
                self._measured.get(position),
                self._gaps[position],
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


def _step_s(ranks: Sequence[Sequence[StepTimes]], period: int) -> float:
    """Of the slowest rank: the median, or the mean where steps differ."""
    typical = statistics.median if period == 1 else statistics.fmean
    return max(typical([each.step_s for each in rank]) for rank in ranks)

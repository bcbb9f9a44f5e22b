"""Means over seeds, and the comparisons at equal steps, equal bytes and equal time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bagua.bench.layout import Columns
from benchmarks.convergence.configurations import Configuration
from benchmarks.convergence.report import TARGETS
from benchmarks.convergence.suite.rows import BASELINE, SuiteRow
from benchmarks.convergence.suite.times import step_ms
from benchmarks.convergence.training import Outcome

__all__ = ["Summary", "budget_loss", "suite_table", "summarise_suite", "verdicts"]


@dataclass(frozen=True)
class Summary:
    """One row on one task. "Behind" is percent of loss above the baseline's with the same seed: positive is worse.

    Attributes:
        task, configuration, label, family, algorithm: which.
        seeds: of the runs that ended and have a baseline; figures are means over them.
        loss, accuracy: of the mean of all ranks' weights.
        loss_own, accuracy_own: mean over the ranks of what their own weights reach.
        behind, worst: at equal steps; mean and largest over the seeds.
        behind_own: the same for the ranks' own weights, mean.
        points_behind: of accuracy, for the mean weights.
        bytes_per_step: sent per rank.
        share_of_bytes: of the baseline's.
        behind_bytes: above the baseline trained with as many bytes; None without such runs.
        step_ms: predicted; None where no prediction fits.
        behind_time: above the baseline trained for as long; None without one of the two.
        target: the largest `behind` that is within it.
        within: whether it is; None for baselines.
        failed: runs that did not end.
    """

    task: str
    configuration: str
    label: str
    family: str
    algorithm: str
    seeds: list[int]
    loss: float
    accuracy: float
    loss_own: float
    accuracy_own: float
    behind: float
    worst: float
    behind_own: float
    points_behind: float
    bytes_per_step: float
    share_of_bytes: float
    behind_bytes: float | None
    step_ms: float | None
    behind_time: float | None
    target: float
    within: bool | None
    failed: int


def budget_loss(budgets: Mapping[float, float], share: float) -> float:
    """Return the baseline's loss with a share of its steps, between those that were run on a log scale.

    Below the least share it is the loss of the least one, above 1 that of 1: nothing is extrapolated.

    Args:
        budgets: loss by share of the steps, at least that of 1.
        share: > 0.

    Examples:
        >>> budget_loss({1.0: 2.0, 0.25: 4.0}, 0.5)
        3.0
    """
    known = sorted(budgets)
    share = min(max(share, known[0]), known[-1])
    for low, high in itertools.pairwise(known):
        if low <= share <= high:
            part = math.log(share / low) / math.log(high / low)
            return budgets[low] + part * (budgets[high] - budgets[low])
    return budgets[known[-1]]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _percent(value: float, reference: float) -> float:
    return 100 * (value / reference - 1)


def summarise_suite(outcomes: Sequence[Outcome], rows: Sequence[SuiteRow], tasks: Sequence[str]) -> list[Summary]:
    """Return a summary for each task and row that has run beside its baseline, but for budgets and controls."""
    runs: dict[tuple[str, str], dict[int, Outcome]] = {}
    failed: dict[tuple[str, str], int] = {}
    for each in outcomes:
        key = each.task, each.configuration
        if each.error or not math.isfinite(each.loss):
            failed[key] = failed.get(key, 0) + 1
        else:
            runs.setdefault(key, {})[each.seed] = each
    bases = {row.configuration.family: row.name for row in rows if row.baseline}
    found: list[Summary] = []
    for task in tasks:
        for row in (row for row in rows if row.share == 1 and not row.order):
            family = row.configuration.family
            base = runs.get((task, bases.get(family, "")), {})
            mine = {seed: run for seed, run in runs.get((task, row.name), {}).items() if seed in base}
            if mine or failed.get((task, row.name)):
                budgets = {
                    seed: {float(each.share): run.loss for each in rows if _budget(each, row)
                           if (run := runs.get((task, each.name), {}).get(seed)) is not None}
                    for seed in mine
                }  # fmt: skip
                found.append(_summary(task, row, mine, base, budgets, failed.get((task, row.name), 0)))
    return found


def _budget(each: SuiteRow, row: SuiteRow) -> bool:
    return each.label == BASELINE and not each.order and each.configuration.family == row.configuration.family


def _summary(
    task: str,
    row: SuiteRow,
    mine: Mapping[int, Outcome],
    base: Mapping[int, Outcome],
    budgets: Mapping[int, Mapping[float, float]],
    failed: int,
) -> Summary:
    configuration, seeds = row.configuration, sorted(mine)
    pairs = [(mine[seed], base[seed]) for seed in seeds]
    behind = [_percent(run.loss, ddp.loss) for run, ddp in pairs]
    sent, ddp_sent = (_mean([pair[place].bytes_per_step for pair in pairs]) for place in (0, 1))
    exact_ms = step_ms(_exact(row), task, ddp_sent)
    ms = step_ms(configuration, task, sent) if seeds else None
    ran = [seed for seed in seeds if len(budgets[seed]) > 1]  # with a baseline that had less

    def against(share: float) -> float | None:
        found = [_percent(mine[seed].loss, budget_loss(budgets[seed], share)) for seed in ran]
        return _mean(found) if found and not row.baseline else None

    within = None if row.baseline or not configuration.algorithm else not failed and _mean(behind) <= _target(row)
    return Summary(
        task=task,
        configuration=row.name,
        label=row.label,
        family=configuration.family,
        algorithm=configuration.algorithm,
        seeds=seeds,
        loss=_mean([run.loss for run, _ in pairs]),
        accuracy=_mean([run.accuracy for run, _ in pairs]),
        loss_own=_mean([run.loss_own for run, _ in pairs]),
        accuracy_own=_mean([run.accuracy_own for run, _ in pairs]),
        behind=_mean(behind),
        worst=max(behind, default=math.nan),
        behind_own=_mean([_percent(run.loss_own, ddp.loss) for run, ddp in pairs]),
        points_behind=_mean([100 * (ddp.accuracy - run.accuracy) for run, ddp in pairs]),
        bytes_per_step=sent,
        share_of_bytes=sent / ddp_sent,
        behind_bytes=against(sent / ddp_sent) if seeds else None,
        step_ms=ms,
        behind_time=against(ms / exact_ms) if ms is not None and exact_ms is not None else None,
        target=_target(row),
        within=within,
        failed=failed,
    )


def _exact(row: SuiteRow) -> Configuration:
    return replace(row.configuration, algorithm=BASELINE, options={}, warmup=0.0, processes=False)


def _target(row: SuiteRow) -> float:
    return TARGETS[row.configuration.synchronous]["loss"]


def verdicts(summaries: Sequence[Summary]) -> dict[str, str]:
    """Return by configuration which tasks miss the target: "within", or "missed: gpt"; baselines are left out."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(each.configuration for each in summaries if each.within is not None):
        missed = [each.task for each in summaries if each.configuration == name and not each.within]
        found[name] = f"missed: {', '.join(missed)}" if missed else "within"
    return found


def suite_table(summaries: Sequence[Summary]) -> str:
    """Return the summaries as text."""
    columns = Columns(
        ("task", -11), ("configuration", -48), ("loss", -9), ("own", -9), ("right", -7), ("behind", -9),
        ("worst", -9), ("bytes", -8), ("at bytes", -9), ("ms/step", -8), ("at time", -9), ("seeds", -6), ("target", -8),
    )  # fmt: skip
    lines: list[list[str]] = []
    for each in summaries:
        verdict = "" if each.within is None else "within" if each.within else "MISSED"
        cells = [each.task, each.configuration, f"{each.loss:.4f}", f"{each.loss_own:.4f}", f"{each.accuracy:.1%}"]
        cells += [f"{each.behind:+.1f} %", f"{each.worst:+.1f} %", f"{each.share_of_bytes:.2%}"]
        cells += [_optional(each.behind_bytes, "{:+.1f} %"), _optional(each.step_ms, "{:.1f}")]
        cells += [_optional(each.behind_time, "{:+.1f} %"), str(len(each.seeds)), verdict]
        lines.append(cells)
    return columns.table(lines)


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)

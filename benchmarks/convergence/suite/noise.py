"""How far apart two runs of the baseline are that differ in their samples only: what a gap has to exceed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.convergence.suite.rows import BASELINE, SuiteRow
from benchmarks.convergence.training import Outcome

__all__ = ["Noise", "noise_of_runs"]


@dataclass(frozen=True)
class Noise:
    """On one task.

    Attributes:
        task, family: which.
        seeds: of which there are controls.
        runs: of the baseline, the controls among them.
        gap_sd: standard deviation of the percentage between the losses of two runs of one seed.
    """

    task: str
    family: str
    seeds: list[int]
    runs: int
    gap_sd: float


def noise_of_runs(outcomes: Sequence[Outcome], rows: Sequence[SuiteRow], tasks: Sequence[str]) -> list[Noise]:
    """Return the noise of each task and family of which there are controls.

    The variance of the losses, relative to their mean, is taken among the runs of a seed, and pooled over the seeds.
    A gap is between two runs, so its variance is twice that.
    """
    found: list[Noise] = []
    families = dict.fromkeys(row.configuration.family for row in rows if row.order)
    for task in tasks:
        for family in families:
            names = {
                row.name
                for row in rows
                if row.label == BASELINE and row.share == 1 and row.configuration.family == family
            }
            losses: dict[int, list[float]] = {}
            for each in outcomes:
                if each.task == task and each.configuration in names and not each.error and math.isfinite(each.loss):
                    losses.setdefault(each.seed, []).append(each.loss)
            several = {seed: each for seed, each in sorted(losses.items()) if len(each) > 1}
            if several:
                squares = [
                    (len(each) - 1) * statistics.variance(each) / statistics.fmean(each) ** 2
                    for each in several.values()
                ]
                runs = sum(map(len, several.values()))
                gap = 100 * math.sqrt(2 * sum(squares) / (runs - len(several)))
                found.append(Noise(task, family, list(several), runs, gap))
    return found

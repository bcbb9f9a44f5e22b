"""Means over seeds, the comparison with DDP, the table and the JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bagua.bench.layout import Columns
from benchmarks.convergence.configurations import Configuration
from benchmarks.convergence.training import Outcome

__all__ = ["TARGETS", "Row", "summarise", "table", "to_json"]

# Least favourable difference to DDP: accuracy in points, loss in percent. For synchronous algorithms, and for others.
TARGETS: Mapping[bool, Mapping[str, float]] = {
    True: {"accuracy": 0.5, "loss": 2.0},
    False: {"accuracy": 1.0, "loss": 4.0},
}


@dataclass(frozen=True)
class Row:
    """One configuration on one task, over all seeds. Differences are positive where it is worse than DDP.

    Attributes:
        task, configuration, family, algorithm, exactness: which.
        runs: "processes over gloo" or "simulated".
        metric: "accuracy" (in percent) or "loss".
        mean, half_range: of the metric, for the mean of all ranks' weights.
        mean_rank0: for rank 0's weights.
        difference: to DDP of the same family and seeds; points of accuracy, percent of loss.
        target: the largest difference that is within it.
        within: whether it is; None without a DDP to compare with, and for DDP itself.
        bytes_per_step: sent per rank.
        consensus: mean distance of the ranks' weights from their mean at the end.
        seeds: number of runs that ended.
    """

    task: str
    configuration: str
    family: str
    algorithm: str
    exactness: str
    runs: str
    metric: str
    mean: float
    half_range: float
    mean_rank0: float
    difference: float | None
    target: float
    within: bool | None
    bytes_per_step: float
    consensus: float
    seeds: int


def summarise(outcomes: Sequence[Outcome], rows: Sequence[Configuration], metrics: Mapping[str, str]) -> list[Row]:
    """Return a row for each task and configuration; `metrics` says by task what is compared."""
    found: list[Row] = []
    for task, metric in metrics.items():
        base: dict[str, dict[int, float]] = {}  # by family and seed
        scale = 100.0 if metric == "accuracy" else 1.0
        for each in rows:
            runs = [o for o in outcomes if (o.task, o.configuration) == (task, each.name) and not o.error]
            if not runs and not any((o.task, o.configuration) == (task, each.name) for o in outcomes):
                continue  # left out
            by_seed = {run.seed: scale * getattr(run, metric) for run in runs}
            values = list(by_seed.values()) or [math.nan]
            first = [scale * getattr(run, f"{metric}_rank0") for run in runs] or [math.nan]
            mean = _mean(values)
            if not each.algorithm:
                base[each.family] = by_seed
            difference = None
            if each.algorithm and each.family in base:
                same_seeds = [value for seed, value in base[each.family].items() if seed in by_seed] or [math.nan]
                reference = _mean(same_seeds)
                difference = reference - mean if metric == "accuracy" else 100 * (mean / reference - 1)
            target = TARGETS[each.synchronous][metric]
            found.append(
                Row(
                    task=task,
                    configuration=each.name,
                    family=each.family,
                    algorithm=each.algorithm,
                    exactness=each.exactness,
                    runs="processes over gloo" if each.processes else "simulated",
                    metric=metric,
                    mean=mean,
                    half_range=(max(values) - min(values)) / 2,
                    mean_rank0=_mean(first),
                    difference=difference,
                    target=target,
                    within=None if difference is None else difference <= target,  # NaN is not within
                    bytes_per_step=_mean([run.bytes_per_step for run in runs] or [math.nan]),
                    consensus=_mean([run.consensus for run in runs] or [math.nan]),
                    seeds=len(runs),
                )
            )
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    columns = Columns(
        ("task", -9), ("configuration", -29), ("result", -18), ("rank 0", -9), ("against DDP", -13), ("kB/step", -12),
        ("times", -9), ("target", -9)
    )  # fmt: skip
    lines: list[list[str]] = []
    for row in rows:
        unit, digits = ("%", 2) if row.metric == "accuracy" else ("", 4)
        change = "" if row.difference is None else f"{row.difference:+.2f} {'pt' if unit else '%'}"
        dense = next(
            (o.bytes_per_step for o in rows if (o.task, o.family, o.algorithm) == (row.task, row.family, "")), math.nan
        )
        verdict = "" if row.within is None else "within" if row.within else "MISSED"
        cells = [row.task, row.configuration, f"{row.mean:.{digits}f}{unit} +- {row.half_range:.{digits}f}"]
        fewer = f"{dense / row.bytes_per_step:.1f}x" if row.bytes_per_step else "-"
        cells += [f"{row.mean_rank0:.{digits}f}", change, f"{row.bytes_per_step / 1000:.1f}", fewer, verdict]
        lines.append(cells)
    return columns.table(lines)


def to_json(header: Mapping[str, Any], rows: Sequence[Any], outcomes: Sequence[Outcome]) -> str:
    """Return everything as JSON, one row (a dataclass) and one run a line; 6 digits; null for what is not finite."""

    def lines(items: Sequence[Any]) -> str:
        return ",\n".join(f"    {json.dumps(_plain(asdict(item)), separators=(',', ':'))}" for item in items)

    top = json.dumps(_plain(dict(header)), indent=2)[:-2]
    return f'{top},\n  "rows": [\n{lines(rows)}\n  ],\n  "runs": [\n{lines(outcomes)}\n  ]\n}}\n'


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value

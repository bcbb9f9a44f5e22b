"""What `bagua plan` predicts beside what `bagua bench` has measured: every cell of the tables of step times.

The constants of `bagua.plan.CPU` were fitted to the cells of FITTED, as `--fit` does. The others are the judgement.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bagua.bench import contenders, models
from bagua.bench.bounds import payload_bits_per_s
from bagua.bench.layout import Columns
from bagua.plan import CPU, Cluster, Costs, Workload, predict
from bagua.plan.prediction import gathered_buckets
from bagua.plan.recipe import recipe_of

RESULTS = Path(__file__).parent / "results"
TABLES = (
    "2026-11-25-bench/tradeoff.json",
    "2026-11-26-beside/tradeoff.json",
    "2026-11-26-latency/wan.json",
    "2026-11-26-latency/wan_judged.json",
    "2026-11-25-curves/curves.json",
    "2026-11-23-advice/tradeoff.json",
    "2026-11-21-bench/scaling.json",
    "2026-11-21-bench/tenth.json",
    "2026-11-21-bench/straggler.json",
)
# Cells whose first measurement contradicts itself (docs/design/0012-plan.md), measured again: table -> the new ones.
AGAIN = {
    "2026-11-21-bench/tenth.json": ("2026-11-23-cells/shift_one.json",),
    "2026-11-21-bench/straggler.json": ("2026-11-23-cells/ddp_powersgd.json",),
}
_LINKS = ("1gbit/0ms", "250mbit/0ms", "100mbit/5ms", "nolimit")
FITTED = {
    *(("2026-11-25-bench/tradeoff.json", condition) for condition in _LINKS),
    ("2026-11-26-latency/wan.json", "100mbit/20ms"),
}
# Contenders whose exchange runs at another moment of a step since a day: their older rows are of other code.
SINCE = {"low_precision_decentralized": "2026-11-26"}
GATHERED_SINCE = "2026-11-26-latency"  # all ranks form the means of small exchanges far away; older rows did not
KEPT = ("off", "ddp")  # in a table that was measured again, for comparison only
CORES = 2.0  # of the machine on which all emulated hosts ran
BUSY = 0.8  # of the machine's cores: above, the emulation is measured and not the cluster
TOLERANCE = 0.15
FITTED_GROUP = "fitted to"
FACTORS = (1.3, 1.1, 1.03, 1.01)  # of the steps of a fit
LEAST = 1e-5  # gain in the mean error for which a fit goes on


def main(argv: Sequence[str] | None = None) -> int:
    """Print the cells that are off, a summary, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--json", help="file for all cells")
    parser.add_argument("--fit", action="store_true", help="fit the constants anew and print them; nothing is changed")
    args = parser.parse_args(argv)
    if args.fit:
        print_fit()
        return 0
    cells = [cell for table in TABLES for cell in cells_of(table)]
    report = {
        "kind": "plan",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "tolerance": TOLERANCE,
        "summary": summary(cells),
        "cells": cells,
    }
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    print(text(cells))
    return 0


def print_fit() -> None:
    """Fit the constants to the cells of FITTED; print each with the one in use, and the mean errors of both."""
    start = error_of(CPU)
    fitted, error = fit(error_of, CPU)
    print(f"{'':20}{'in use':>12}{'fitted':>12}")
    for field in fields(Costs):
        print(f"{field.name:20}{getattr(CPU, field.name):>12.3g}{getattr(fitted, field.name):>12.3g}")
    print(f"{'mean error':20}{start:>12.2%}{error:>12.2%}")


def error_of(costs: Costs) -> float:
    """Mean of the absolute logarithm of predicted to measured time, over the cells of FITTED."""
    tables = {table for table, _ in FITTED}
    found = [abs(math.log(cell["ratio"])) for t in tables for cell in cells_of(t, costs, fitted_only=True)]
    return statistics.fmean(found)


def fit(error_of: Callable[[Costs], float], costs: Costs) -> tuple[Costs, float]:
    """Coordinate descent: each constant in turn is multiplied and divided by a factor, smaller at a standstill."""
    best = error_of(costs)
    for factor in FACTORS:
        moved = True
        while moved:
            moved = False
            for field in fields(costs):
                for by in (factor, 1 / factor):
                    value = getattr(costs, field.name) * by
                    if field.name.endswith("_efficiency") and value > 1:
                        continue
                    error = error_of(tried := replace(costs, **{field.name: value}))
                    if error < best - LEAST:
                        costs, best, moved = tried, error, True
    return costs, best


def cells_of(table: str, costs: Costs = CPU, fitted_only: bool = False) -> Iterator[dict[str, Any]]:
    """Measured and predicted milliseconds of each row whose course is known."""
    report = _with_again(table)
    conditions = {condition["name"]: condition for condition in report["settings"]["conditions"]}
    rate_of = payload_bits_per_s if report["settings"].get("headers") == "each packet" else float
    for row in report["rows"]:
        if row.get("error") or row["family"] not in ("bagua", "torch") or row["entrant"].startswith("off"):
            continue
        if table < SINCE.get(row["entrant"], ""):
            continue
        group = group_of(table, row)
        if fitted_only and group != FITTED_GROUP:
            continue
        condition = conditions[row["condition"]]
        # The times are those of the slowest rank that the others wait for; a workload is one of a fast host.
        slow = condition["slow"] if contenders.get(row["entrant"]).synchronous else 1.0
        step_s, forward_s, optimizer_s = (
            slow * row[f"{part}_ms"] / 1e3 for part in ("compute", "forward", "optimizer")
        )
        workload = Workload(models.get(row["model"]), step_s - optimizer_s, forward_s, optimizer_s)
        cluster = Cluster(
            row["hosts"],
            bandwidth=rate_of(condition["bits_per_s"] or math.inf),
            latency=condition["latency_s"],
            cores=CORES / row["hosts"],
            slowest=slow,
        )
        recipe = recipe_of(row["entrant"], workload.model, cluster)
        if table < GATHERED_SINCE and any(gathered_buckets(recipe, cluster)):
            continue
        predicted = 1e3 * predict(row["entrant"], workload, cluster, costs).step_s
        yield {
            "table": table,
            "condition": row["condition"],
            "hosts": row["hosts"],
            "algorithm": row["entrant"],
            "measured_ms": row["step_ms"],
            "predicted_ms": predicted,
            "ratio": predicted / row["step_ms"],
            "busy": row["busy"],
            "group": group,
        }


def _with_again(table: str) -> dict[str, Any]:
    """A table, with the rows that were measured again in place of the first ones. Its references stay."""
    report = json.loads((RESULTS / table).read_text())
    for other in AGAIN.get(table, ()):
        newer = {
            _cell(row): row for row in json.loads((RESULTS / other).read_text())["rows"] if row["entrant"] not in KEPT
        }
        report["rows"] = [newer.pop(_cell(row), row) for row in report["rows"]]
        if newer:
            raise ValueError(f"{other}: {', '.join(map(str, newer))} is not in {table}")
    return report


def _cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("condition", "model", "hosts", "entrant"))


def group_of(table: str, row: dict[str, Any]) -> str:
    """Which cells are judged together."""
    if row["busy"] > BUSY:
        return "emulation limited by its CPU"
    return FITTED_GROUP if (table, row["condition"]) in FITTED else "not fitted to"


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By group: cells, share within the tolerance, and the median and largest error."""
    found: dict[str, dict[str, float]] = {}
    for group in dict.fromkeys(cell["group"] for cell in cells):
        errors = [abs(cell["ratio"] - 1) for cell in cells if cell["group"] == group]
        found[group] = {
            "cells": len(errors),
            "within_tolerance": sum(error <= TOLERANCE for error in errors) / len(errors),
            "median_error": statistics.median(errors),
            "largest_error": max(errors),
        }
    return found


def text(cells: Sequence[dict[str, Any]]) -> str:
    """The cells beyond the tolerance, and the summary."""
    columns = Columns(("condition", -20), ("hosts", 5), ("  algorithm", -40), ("measured", 10), ("predicted", 11))
    off = [cell for cell in cells if abs(cell["ratio"] - 1) > TOLERANCE]
    rows = [
        [
            cell["condition"],
            str(cell["hosts"]),
            f"  {cell['algorithm']}",
            f"{cell['measured_ms']:.0f}",
            f"{cell['predicted_ms']:.0f}",
        ]
        for cell in off
    ]
    lines = [f"cells off by more than {TOLERANCE:.0%} (ms a step):", columns.table(rows), ""]
    for group, values in summary(cells).items():
        lines.append(
            f"{group}: {values['cells']:.0f} cells, {values['within_tolerance']:.0%} within {TOLERANCE:.0%}, "
            f"median error {values['median_error']:.1%}, largest {values['largest_error']:.0%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

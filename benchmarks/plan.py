"""What `bagua plan` predicts beside what `bagua bench` has measured: every cell of the tables of step times.

The constants of `bagua.plan.CPU` were fitted to the cells of FITTED. The others are the judgement.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bagua.bench import contenders, models
from bagua.bench.layout import Columns
from bagua.plan import Cluster, Workload, predict

RESULTS = Path(__file__).parent / "results"
TABLES = (
    "2026-11-22-bench/tradeoff.json",
    "2026-11-21-bench/scaling.json",
    "2026-11-21-bench/tenth.json",
    "2026-11-21-bench/straggler.json",
)
FITTED = {("2026-11-22-bench/tradeoff.json", condition) for condition in ("1gbit/0ms", "250mbit/0ms", "nolimit")}
CORES = 2.0  # of the machine on which all emulated hosts ran
BUSY = 0.8  # of the machine's cores: above, the emulation is measured and not the cluster
TOLERANCE = 0.15


def main(argv: Sequence[str] | None = None) -> int:
    """Print the cells that are off, a summary, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--json", help="file for all cells")
    args = parser.parse_args(argv)
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


def cells_of(table: str) -> Iterator[dict[str, Any]]:
    """Measured and predicted milliseconds of each row whose course is known."""
    report = json.loads((RESULTS / table).read_text())
    conditions = {condition["name"]: condition for condition in report["settings"]["conditions"]}
    for row in report["rows"]:
        if row.get("error") or row["family"] not in ("bagua", "torch") or row["entrant"].startswith("off"):
            continue
        condition = conditions[row["condition"]]
        slow = condition["slow"] if contenders.get(row["entrant"]).synchronous else 1.0  # in `compute_ms` already
        optimizer_s, step_s = row["optimizer_ms"] / 1e3, row["compute_ms"] / 1e3 * slow
        workload = Workload(models.get(row["model"]), step_s - optimizer_s, row["forward_ms"] / 1e3, optimizer_s)
        cluster = Cluster(
            row["hosts"],
            bandwidth=condition["bits_per_s"] or math.inf,
            latency=condition["latency_s"],
            cores=CORES / row["hosts"],
            slowest=slow,
        )
        predicted = 1e3 * predict(row["entrant"], workload, cluster).step_s
        yield {
            "table": table,
            "condition": row["condition"],
            "hosts": row["hosts"],
            "algorithm": row["entrant"],
            "measured_ms": row["step_ms"],
            "predicted_ms": predicted,
            "ratio": predicted / row["step_ms"],
            "busy": row["busy"],
            "group": group_of(table, row),
        }


def group_of(table: str, row: dict[str, Any]) -> str:
    """Which cells are judged together."""
    if row["busy"] > BUSY:
        return "emulation limited by its CPU"
    return "fitted to" if (table, row["condition"]) in FITTED else "not fitted to"


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

"""The table of a run of `make demo`."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["rows"]


def rows(path: Path) -> str:
    """Accuracy and bytes of each algorithm. Times are left out: they say more of the machine's load than of Bagua."""
    report = json.loads(path.read_text())
    steps = report["rows"][0]["steps"]
    origin = (
        f"{report['epochs']} epochs ({steps} steps) on {report['ranks']} ranks, torch {report['torch']}: "
        f"`benchmarks/results/{path.parent.name}/{path.name}`.\n\n"
    )
    lines = ["| algorithm | test accuracy | MB sent per step and rank | compression |", "|---|---|---|---|"]
    for row in report["rows"]:
        ratio = row["compression_ratio"]
        lines.append(
            f"| {row['algorithm']} | {100 * row['test_accuracy']:.1f} % | {row['mb_per_step']:.2f} | "
            f"{ratio:.{0 if ratio >= 10 else 1}f} |"
        )
    return origin + "\n".join(lines) + "\n"

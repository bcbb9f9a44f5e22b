"""Tables in Markdown from what `bagua bench net` wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bagua.bench.net_cases import CASES

__all__ = ["OTHERS", "markdown", "of_congestion"]

OTHERS = 0.12  # share of the machine from which a run is not counted

Rows = Sequence[Mapping[str, Any]]


def of_congestion(rows: Rows, congestion: str, otherwise: str) -> list[Mapping[str, Any]]:
    """The runs with a congestion control; `otherwise` is that of runs which do not say."""
    return [row for row in rows if row.get("congestion", otherwise) == congestion]


def markdown(report: Mapping[str, Any], judge: Callable[[Rows], list[dict[str, Any]]]) -> str:
    """A table of the runs and one of the goals, for each congestion control."""
    otherwise = report["machine"]["congestion_control"]
    parts = []
    for congestion in dict.fromkeys(row.get("congestion", otherwise) for row in report["runs"]):
        rows = of_congestion(report["runs"], congestion, otherwise)
        lines = [f"TCP with {congestion}, {report['machine']['cores']} cores, {report['machine']['cpu']}:", ""]
        parts.append("\n".join([*lines, *_runs(rows), "", *_goals(judge(rows))]))
    return "\n\n".join(parts)


def _runs(rows: Rows) -> list[str]:
    lines = [
        "| link | plugin | runs | median, Gbit/s | range | typical tenth of a second | CPU s per GB |",
        "|---|---|---|---|---|---|---|",
    ]
    links = {case.name: case.what for case in CASES}
    for case, variant in dict.fromkeys((row["case"], row["variant"]) for row in rows):
        mine = [row for row in rows if (row["case"], row["variant"]) == (case, variant)]
        counted = [row for row in mine if "gbit_s" in row and row["others_cpu"] <= OTHERS]
        start = f"| {links.get(case, case)} | {variant} | "
        if not counted:
            lines.append(f"{start}0 of {len(mine)} | | | | |")
            continue
        rates = [row["gbit_s"] for row in counted]
        num = str(len(counted)) if len(counted) == len(mine) else f"{len(counted)} of {len(mine)}"
        typical = median(row["typical_gbit_s"] for row in counted)
        cpu = median(max(row["cpu_s_per_gb"]) for row in counted)
        spread = f"{min(rates):.2f} to {max(rates):.2f}"
        lines.append(f"{start}{num} | {median(rates):.2f} | {spread} | {typical:.2f} | {cpu:.2f} |")
    return lines


def _goals(goals: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| goal | wanted | reached | |", "|---|---|---|---|"]
    for goal in goals:
        bound = "at most" if goal["at_most"] else "at least"
        value = "not measured" if goal["value"] is None else f"{goal['value']:.3g}"
        verdict = "" if goal["met"] is None else "yes" if goal["met"] else "missed"
        lines.append(f"| {goal['goal']} | {bound} {goal['wanted']:g} | {value} | {verdict} |")
    return lines

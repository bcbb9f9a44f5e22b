"""Tables in Markdown from what `bagua bench net` wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bagua.bench.layout import markdown_table
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
        heading = f"TCP with {congestion}, {report['machine']['cores']} cores, {report['machine']['cpu']}:"
        parts += [heading, _runs(rows), _goals(judge(rows))]
    return "\n\n".join(parts)


def _runs(rows: Rows) -> str:
    found: list[list[str]] = []
    links = {case.name: case.what for case in CASES}
    for case, variant in dict.fromkeys((row["case"], row["variant"]) for row in rows):
        mine = [row for row in rows if (row["case"], row["variant"]) == (case, variant)]
        counted = [row for row in mine if "gbit_s" in row and row["others_cpu"] <= OTHERS]
        start = [links.get(case, case), variant]
        if not counted:
            found.append([*start, f"0 of {len(mine)}", "", "", "", ""])
            continue
        rates = [row["gbit_s"] for row in counted]
        num = str(len(counted)) if len(counted) == len(mine) else f"{len(counted)} of {len(mine)}"
        typical = median(row["typical_gbit_s"] for row in counted)
        cpu = median(max(row["cpu_s_per_gb"]) for row in counted)
        spread = f"{min(rates):.2f} to {max(rates):.2f}"
        found.append([*start, num, f"{median(rates):.2f}", spread, f"{typical:.2f}", f"{cpu:.2f}"])
    head = ("link", "plugin", "runs", "median, Gbit/s", "range", "typical tenth of a second", "CPU s per GB")
    return markdown_table(head, found)


def _goals(goals: Sequence[Mapping[str, Any]]) -> str:
    found: list[list[str]] = []
    for goal in goals:
        bound = "at most" if goal["at_most"] else "at least"
        value = "not measured" if goal["value"] is None else f"{goal['value']:.3g}"
        verdict = "" if goal["met"] is None else "yes" if goal["met"] else "missed"
        found.append([goal["goal"], f"{bound} {goal['wanted']:g}", value, verdict])
    return markdown_table(("goal", "wanted", "reached", ""), found)

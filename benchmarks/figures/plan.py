"""What `bagua plan` predicts against what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.figures.axes import Axis, Panel
from benchmarks.figures.svg import COLOURS, EDGE, GREY, Drawing

__all__ = ["draw_predictions", "rows"]

_WIDTH = 480
_TICKS = (300, 500, 1000, 2000, 5000, 10000)


def draw_predictions(path: Path) -> Drawing:
    """A point for each cell of the measured tables."""
    report = json.loads(path.read_text())
    cells: list[dict[str, Any]] = report["cells"]
    groups = list(report["summary"])
    drawing = Drawing(_WIDTH, 490 + 16 * len(groups), "Predicted and measured step times")
    x = Axis("measured, ms a step", 250, 16000, _TICKS, log=True)
    y = Axis("predicted, ms a step", 250, 16000, _TICKS, log=True)
    panel = Panel(drawing, 60, 32, _WIDTH - 80, 380, x, y, "each point: one algorithm on one emulated network")
    ends = (250.0, 16000.0)
    panel.curve(ends, ends, GREY, width=1)
    for factor in (1 + report["tolerance"], 1 / (1 + report["tolerance"])):
        panel.curve(ends, [end * factor for end in ends], EDGE, dash="3 3", width=1)
    for cell in cells:
        drawing.dot(*panel.place(cell["measured_ms"], cell["predicted_ms"]), COLOURS[groups.index(cell["group"])], 2.5)
    for number, group in enumerate(groups):
        line = 478 + 16 * number
        drawing.dot(20, line - 4, COLOURS[number], 3)
        drawing.text(30, line, f"{group}: {_words(report, group)}", size=11, colour=GREY)
    return drawing


def rows(path: Path) -> str:
    """The table of the groups."""
    report = json.loads(path.read_text())
    within = f"within {report['tolerance']:.0%}"
    head = f"| cells | number | {within} | median error | largest error |\n|---|---:|---:|---:|---:|\n"
    lines = [
        f"| {group} | {values['cells']} | {values['within_tolerance']:.0%} | {values['median_error']:.1%} | "
        f"{values['largest_error']:.0%} |"
        for group, values in report["summary"].items()
    ]
    return head + "\n".join(lines)


def _words(report: dict[str, Any], group: str) -> str:
    values = report["summary"][group]
    return f"{values['cells']} cells, {values['within_tolerance']:.0%} within {report['tolerance']:.0%}"

"""Step time against bandwidth, and against latency, with the bound of each line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bagua.bench import conditions
from benchmarks.figures.axes import Axis, Panel
from benchmarks.figures.svg import COLOURS, GREY, INK, Drawing

__all__ = ["Curves", "draw_bandwidth", "draw_latency"]

LINES = {
    "ddp": "torch DDP",
    "gradient_allreduce": "gradient_allreduce",
    "bytegrad": "bytegrad, 8 bits",
    "int4": "gradient_allreduce, 4 bits",
    "qadam_1bit": "qadam, 1 bit",
    "low_precision_decentralized": "low-precision gossip, 8 bits",
}
_COLOURS = dict(zip(LINES, (INK, *COLOURS), strict=False))
_TICKS = (50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
_WIDTH = 480  # on a phone, letters of 12 are 9 pixels high
_BEYOND = 2.5  # times the largest bandwidth: where no limit is drawn


class _Point(NamedTuple):
    x: float
    step_ms: float
    bound_ms: float
    limited: bool


class Curves:
    """A file of `bagua bench curves`.

    Attributes:
        path: in the repository.
    """

    def __init__(self, path: Path) -> None:
        self._data: dict[str, Any] = json.loads(path.read_text())
        self.path = f"benchmarks/results/{path.parent.name}/{path.name}"
        rows = [row for row in self._data["rows"] if row["entrant"] in LINES and not row["error"]]
        self._rows = [(conditions.parse(row["condition"]), row) for row in rows]

    def by_bandwidth(self) -> dict[str, list[_Point]]:
        """Points of each line, in Mbit/s; without a limit `math.inf`."""
        return self._lines([(c.bits_per_s / 1e6, row) for c, row in self._rows if not c.latency_s])

    def by_latency(self) -> tuple[float, dict[str, list[_Point]]]:
        """The bandwidth in Mbit/s that has most latencies, and the points of each line, in ms one way."""
        rates = {c.bits_per_s for c, _ in self._rows if c.latency_s}
        rate = max(rates, key=lambda rate: len({c.latency_s for c, _ in self._rows if c.bits_per_s == rate}))
        return rate / 1e6, self._lines([(1000 * c.latency_s, row) for c, row in self._rows if c.bits_per_s == rate])

    def _lines(self, points: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, list[_Point]]:
        made: dict[str, list[_Point]] = {}
        for name in LINES:
            mine = [(x, row) for x, row in points if row["entrant"] == name]
            found = [_Point(x, row["step_ms"], row["bound_ms"], bool(row["limited"])) for x, row in mine]
            if found:
                made[name] = sorted(found)
        return made

    def captions(self) -> tuple[str, str]:
        """What was measured, in two lines."""
        settings, elements = self._data["settings"], self._data["model"]["num_elements"]
        return (
            f"{settings['hosts']} emulated hosts, {elements / 1e6:.1f} M fp32 parameters,",
            f"{settings['compute_ms']:g} ms of emulated compute, 2 shared cores; {self._data['date'][:10]}",
        )


def draw_bandwidth(curves: Curves) -> Drawing:
    """Step time against bandwidth."""
    lines = curves.by_bandwidth()
    rates = sorted({point.x for points in lines.values() for point in points})
    largest = max(rate for rate in rates if rate < math.inf)
    unlimited = _BEYOND * largest
    drawn = {
        name: [point._replace(x=unlimited) if point.x == math.inf else point for point in points]
        for name, points in lines.items()
    }
    ticks = [rate for rate in rates if rate < math.inf]
    x = Axis("bandwidth of a host, Mbit/s", rates[0] / 1.15, unlimited * 1.25, ticks, log=True)
    drawing, panel = _panel(drawn, x, "Step time by bandwidth, no latency")
    if math.inf in rates:
        at, bottom = panel.place(unlimited, _low(drawn))
        drawing.text(at, bottom + 15, "no limit", "middle", 11)
    _lines_and_legend(drawing, panel, drawn, curves)
    return drawing


def draw_latency(curves: Curves) -> Drawing:
    """Step time against latency."""
    rate, lines = curves.by_latency()
    delays = sorted({point.x for points in lines.values() for point in points})
    x = Axis("latency one way, ms", -1, delays[-1] + 2, delays)
    drawing, panel = _panel(lines, x, f"Step time by latency, {rate:g} Mbit/s")
    _lines_and_legend(drawing, panel, lines, curves)
    return drawing


def _low(lines: Mapping[str, Sequence[_Point]]) -> float:
    return min(min(point.step_ms, point.bound_ms) for points in lines.values() for point in points) / 1.15


def _panel(lines: Mapping[str, Sequence[_Point]], x: Axis, title: str) -> tuple[Drawing, Panel]:
    low, high = _low(lines), 1.15 * max(point.step_ms for points in lines.values() for point in points)
    y = Axis("ms a step", low, high, [tick for tick in _TICKS if low <= tick <= high], log=True)
    drawing = Drawing(_WIDTH, 420 + 16 * len(lines) + 70, title)
    return drawing, Panel(drawing, 60, 32, _WIDTH - 80, 320, x, y, title)


def _lines_and_legend(drawing: Drawing, panel: Panel, lines: Mapping[str, Sequence[_Point]], curves: Curves) -> None:
    for name, points in lines.items():
        colour = _COLOURS[name]
        xs = [point.x for point in points]
        if name != "ddp" or "gradient_allreduce" not in lines:  # both send the same bytes
            panel.curve(xs, [point.bound_ms for point in points], colour, "3 3", 1.2)
        panel.curve(xs, [point.step_ms for point in points], colour)
        for point in points:
            drawing.dot(*panel.place(point.x, point.step_ms), colour, 3, hollow=point.limited)
    top = 416
    for number, name in enumerate(lines):
        drawing.line([(14, top - 4 + 16 * number), (38, top - 4 + 16 * number)], _COLOURS[name], 2)
        drawing.text(46, top + 16 * number, LINES[name])
    captions = (
        "dashed: the bound, the least that the link allows for these bytes",
        "hollow: the machine and not the link may have been the limit",
        *curves.captions(),
    )
    for number, words in enumerate(captions):
        drawing.text(12, top + 16 * len(lines) + 8 + 15 * number, words, size=11, colour=INK if number < 2 else GREY)

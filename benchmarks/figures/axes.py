"""A panel with two axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.figures.svg import GREY, GRID, Drawing

__all__ = ["Axis", "Panel"]


@dataclass(frozen=True)
class Axis:
    """What an axis shows.

    Args:
        label: with the unit.
        low, high: the values at its ends.
        ticks: the values that are written beside it.
        log: equal ratios have equal lengths.
        form: how a tick is written.
    """

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    log: bool = False
    form: str = "{:g}"

    def share(self, value: float) -> float:
        """Where a value lies between the ends: 0 to 1."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / (high - low)


class Panel:
    """Axes with their ticks and a title, drawn at once."""

    def __init__(
        self, drawing: Drawing, left: float, top: float, width: float, height: float, x: Axis, y: Axis, title: str
    ) -> None:
        self._drawing, self._x, self._y = drawing, x, y
        self._left, self._bottom, self._width, self._height = left, top + height, width, height
        drawing.text(left, top - 8, title, bold=True)
        for value in x.ticks:
            at, _ = self.place(value, y.low)
            drawing.line([(at, top), (at, self._bottom)], GRID)
            drawing.text(at, self._bottom + 15, x.form.format(value), "middle", 11)
        for value in y.ticks:
            _, at = self.place(x.low, value)
            drawing.line([(left, at), (left + width, at)], GRID)
            drawing.text(left - 6, at + 4, y.form.format(value), "end", 11)
        drawing.line([(left, top), (left, self._bottom), (left + width, self._bottom)], GREY)
        drawing.text(left + width / 2, self._bottom + 31, x.label, "middle", 11)
        drawing.text(left - 36, top + height / 2, y.label, "middle", 11, turned=True)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies in the drawing."""
        return self._left + self._width * self._x.share(x), self._bottom - self._height * self._y.share(y)

    def curve(self, xs: Sequence[float], ys: Sequence[float], colour: str, dash: str = "", width: float = 1.8) -> None:
        """Join points of the panel."""
        points = [self.place(x, min(max(y, self._y.low), self._y.high)) for x, y in zip(xs, ys, strict=True)]
        self._drawing.line(points, colour, width, dash)

    def band(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], colour: str) -> None:
        """Fill what lies between two curves."""
        there = [self.place(x, min(max(y, self._y.low), self._y.high)) for x, y in zip(xs, highs, strict=True)]
        back = [self.place(x, min(max(y, self._y.low), self._y.high)) for x, y in zip(xs, lows, strict=True)]
        self._drawing.area([*there, *reversed(back)], colour)

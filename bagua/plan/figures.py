"""Lines of predictions over bandwidth and over scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bagua.bench import canvas

__all__ = ["draw_lines", "draw_scatter", "drawn"]

_MAX_LINES = 8
_COLOURS = ("#c1272d", "#1f6fb4", "#2f8f4e", "#8a4fa3", "#d98324", "#4d4d4d", "#17a2a2", "#a0703c")


def drawn(names: Sequence[str]) -> list[str]:
    """The names that a figure has room for: the first eight, and "ddp" in any case."""
    found = list(names)[:_MAX_LINES]
    if "ddp" in names and "ddp" not in found:
        found[-1] = "ddp"
    return found


def draw_lines(
    series: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, path: Path, *, log: bool, left_out: int = 0
) -> list[Path]:
    """Draw one line for each name.

    Args:
        log: the values have a logarithmic axis; x has one always.
        left_out: names that have no line, for the title.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    with canvas.drawing() as plt:
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        for (name, points), colour in zip(series.items(), _COLOURS, strict=False):
            style = "--" if name.startswith("ddp") or name == "post_local_sgd" else "-"
            axes.plot([at for at, _ in points], [value for _, value in points], style, color=colour, label=name)
        axes.set_xscale("log")
        if log:
            axes.set_yscale("log")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        canvas.tidy(axes)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, borderaxespad=0)
        more = f"; {left_out} more in the table" if left_out else ""
        axes.set_title(f"predicted, not measured{more}", loc="left")
        return canvas.save(figure, [path])


def draw_scatter(points: Sequence[tuple[float, float, str]], path: Path, tolerance: float) -> list[Path]:
    """Draw predicted over measured milliseconds.

    Args:
        points: measured, predicted, and the group that has a colour.
        tolerance: relative; drawn as two lines.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    with canvas.drawing() as plt:
        figure, axes = plt.subplots(figsize=(6, 6), layout="constrained")
        for group, colour in zip(dict.fromkeys(group for *_, group in points), _COLOURS, strict=False):
            some = [(measured, predicted) for measured, predicted, each in points if each == group]
            axes.plot(*zip(*some, strict=True), "o", markersize=4, color=colour, alpha=0.7, label=group)
        ends = [min(min(a, b) for a, b, _ in points) / 1.2, max(max(a, b) for a, b, _ in points) * 1.2]
        for factor, style in ((1.0, "-"), (1 + tolerance, ":"), (1 / (1 + tolerance), ":")):
            axes.plot(ends, [end * factor for end in ends], style, color="#888888", linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("measured ms a step")
        axes.set_ylabel("predicted ms a step")
        canvas.tidy(axes)
        axes.legend(loc="upper left", frameon=False)
        return canvas.save(figure, [path])

"""Lines of predictions over bandwidth and over scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bagua.bench import canvas

__all__ = ["draw_lines", "drawn"]

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

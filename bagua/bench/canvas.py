"""Figures by matplotlib: one style, and files that are equal when drawn again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["GRID", "drawing", "save", "tidy"]

GRID = "#e4e6ea"


@contextmanager
def drawing(font_size: float = 9) -> Iterator[Any]:
    """Give `matplotlib.pyplot`, without a display, in the style of all figures.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {"font.size": font_size, "font.family": "DejaVu Sans", "svg.fonttype": "none"}
    with pyplot.rc_context({**style, "svg.hashsalt": "bagua"}):
        yield pyplot


def tidy(axes: Any, grid: str = "both") -> None:
    """Lines behind what is drawn, and no frame above and to the right.

    Args:
        axes: of matplotlib.
        grid: "x", "y" or "both": which values have lines.
    """
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=GRID)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, paths: Sequence[Path], dpi: int = 110) -> list[Path]:
    """Write `figure` to files of the kinds that their names end in; makes their folders. Returns `paths`."""
    from matplotlib import pyplot

    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return list(paths)

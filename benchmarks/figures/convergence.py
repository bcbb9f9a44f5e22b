"""A figure for each algorithm: its loss curves beside DDP's."""

from __future__ import annotations

from benchmarks.figures.axes import Axis, Panel
from benchmarks.figures.results import Convergence
from benchmarks.figures.svg import COLOURS, GREY, Drawing, percent, signed

__all__ = ["draw"]

_TASKS = {
    "digits": ("handwritten digits", Axis("test loss", 0.1, 3.0, (0.1, 0.2, 0.5, 1, 2), log=True)),
    "char_lm": ("characters of a text", Axis("test loss", 2.0, 4.6, (2, 2.5, 3, 3.5, 4, 4.5), log=True)),
}
_DASHES = ("", "7 3", "2 3", "9 3 2 3")


def draw(results: Convergence, algorithm: str) -> Drawing:
    """Return the figure."""
    names = results.of_algorithm(algorithm)
    baselines = list(dict.fromkeys(results.baseline(name) for name in names))
    entries = [(name, GREY, _DASHES[number]) for number, name in enumerate(baselines)]
    entries += [(name, COLOURS[number % len(COLOURS)], "") for number, name in enumerate(names)]
    height = 304 + 32 * len(entries)
    drawing = Drawing(480, height, f"Loss of {algorithm} and DistributedDataParallel")
    for number, (task, (title, y)) in enumerate(_TASKS.items()):
        steps = results.curve(task, baselines[0]).steps
        x = Axis("steps", 0, steps[-1], range(0, steps[-1] + 1, 24 if steps[-1] < 150 else 40))
        panel = Panel(drawing, 54 + 238 * number, 32, 172, 190, x, y, title)
        for name, colour, dash in entries:
            curve = results.curve(task, name)
            panel.band(curve.steps, curve.low, curve.high, colour)
            panel.curve(curve.steps, curve.mean, colour, dash)
    for number, (name, colour, dash) in enumerate(entries):
        y = 276 + 32 * number
        drawing.line([(12, y - 4), (42, y - 4)], colour, 2.5, dash)
        drawing.text(50, y, name, bold=True)
        drawing.text(50, y + 15, _final(results, "digits", name))
        drawing.text(270, y + 15, _final(results, "char_lm", name))
    drawing.text(12, height - 22, "in brackets: behind DDP, positive is worse", size=11, colour=GREY)
    caption = f"{results.ranks} ranks; mean and range of {results.seeds} seeds; {results.date}"
    drawing.text(12, height - 8, caption, size=11, colour=GREY)
    return drawing


def _final(results: Convergence, task: str, name: str) -> str:
    """The result, and in brackets how far it is behind DDP: positive is worse, as in the tables."""
    row = results.row(task, name)
    accuracy = row["metric"] == "accuracy"
    text = f"{row['mean']:.1f} % right" if accuracy else f"loss {row['mean']:.3f}"
    behind = row["difference"]
    if behind is None:
        return text
    return text + (f" ({signed(behind)} points)" if accuracy else f" ({percent(behind)})")

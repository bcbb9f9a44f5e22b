"""Loss against steps and against bytes: one figure a task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from bagua.bench import canvas
from benchmarks.convergence.configurations import Configuration
from benchmarks.convergence.training import Outcome

__all__ = ["plot"]

_TITLES = {"digits": "Handwritten digits, convolutional net", "char_lm": "Characters of a text, recurrent net"}
_STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))


def _panels(rows: Sequence[Configuration]) -> list[tuple[str, list[Configuration]]]:
    """Title and configurations of each row of panels, DDP first."""
    parts = [
        ("SGD, one set of weights", lambda c: c.family == "sgd" and c.synchronous),
        ("SGD, weights of each rank's own", lambda c: c.family == "sgd" and not c.synchronous),
        ("Adam and LAMB", lambda c: c.family != "sgd"),
    ]
    found = []
    for title, belongs in parts:
        chosen = [c for c in rows if c.algorithm and belongs(c)]
        bases = [c for c in rows if not c.algorithm and c.family in {each.family for each in chosen}]
        if chosen:
            found.append((title, bases + chosen))
    return found or [("DDP", list(rows))]


def _curve(outcomes: Sequence[Outcome]) -> tuple[list[int], list[float], list[float]]:
    """Steps, loss and megabytes, means over seeds."""
    losses = [sum(point) / len(point) for point in zip(*(each.curve_loss for each in outcomes), strict=True)]
    mbs = [sum(point) / len(point) for point in zip(*(each.curve_mb for each in outcomes), strict=True)]
    return list(outcomes[0].curve_steps), losses, mbs


def plot(task: str, rows: Sequence[Configuration], outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Write `<task>.png` and `<task>.svg`; returns their paths."""
    panels = _panels(rows)
    log = task == "digits"
    with canvas.drawing() as plt:
        figure, grid = plt.subplots(
            len(panels), 2, figsize=(13, 1 + 3.7 * len(panels)), sharey=True, layout="constrained", squeeze=False
        )
        finite = [loss for each in outcomes if each.task == task for loss in each.curve_loss[:1] if math.isfinite(loss)]
        for (left, right), (title, chosen) in zip(grid, panels, strict=True):
            bases = sum(not each.algorithm for each in chosen)
            for index, configuration in enumerate(chosen):
                runs = [o for o in outcomes if (o.task, o.configuration) == (task, configuration.name) and not o.error]
                if not runs:
                    continue
                steps, losses, mbs = _curve(runs)
                number = index - bases
                base = number < 0
                style = {
                    "color": "black" if base else f"C{number % 10}",
                    "linestyle": _STYLES[index % 3] if base else _STYLES[number // 10 + number % 2],
                    "linewidth": 2.4 if base else 1.4,
                    "zorder": 2 if base else 3,
                }
                label = configuration.name + ("" if math.isfinite(losses[-1]) else " (diverged)")
                left.plot(steps, losses, label=label, **style)
                right.plot(mbs[1:], losses[1:], **style)
            left.set_title(title, loc="left", weight="bold")
            if finite:
                left.set_ylim(top=1.1 * max(finite))  # what diverges leaves the panel
            left.set_ylabel("loss, data held out")
            right.set_xscale("log")
            for axes in (left, right):
                if log:
                    axes.set_yscale("log")
                canvas.tidy(axes)
            handles, labels = left.get_legend_handles_labels()
            right.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False, borderaxespad=0)
        grid[-1][0].set_xlabel("steps")
        grid[-1][1].set_xlabel("MB sent per rank")
        seeds = len({each.seed for each in outcomes})
        figure.suptitle(
            f"{_TITLES.get(task, task)}: 4 ranks, mean of {seeds} seed{'s' * (seeds != 1)}, mean of the ranks' weights",
            x=0.01, ha="left", weight="bold",
        )  # fmt: skip
        return canvas.save(figure, [folder / f"{task}.{kind}" for kind in ("png", "svg")])

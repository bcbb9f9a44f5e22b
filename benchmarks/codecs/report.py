"""The table, the JSON file and the plot of the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bagua.bench import canvas
from bagua.bench.layout import Columns
from bagua.bench.machine import describe_machine, now

COLUMNS = Columns(
    ("codec", -36), ("operation", -22), ("backend", -15), ("MB", 6), ("GB/s", 7), ("memcpy", 7), ("ratio", 7),
    ("target", 12)
)  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    target = "" if row["target"] is None else f"{row['target']:.2f} {'pass' if row['met'] else 'MISS'}"
    speeds = [f"{row['size_mb']:g}", f"{row['gb_per_s']:.1f}", f"{row['memcpy_gb_per_s']:.1f}", f"{row['ratio']:.2f}"]
    return COLUMNS.row([row["codec"], row["operation"], row["backend"], *speeds, target])


def summary(rows: Sequence[dict[str, Any]], backend: str) -> str:
    """How many targets a backend meets, and which it misses."""
    aimed = [row for row in rows if row["backend"] == backend and row["target"] is not None]
    missed = [row for row in aimed if not row["met"]]
    lines = [f"{backend}: {len(aimed) - len(missed)} of {len(aimed)} targets met"]
    for row in missed:
        what = f"{row['codec']} {row['operation']} at {row['size_mb']:g} MB"
        lines.append(f"  missed: {what}: {row['ratio']:.2f} of {row['target']:.2f}{' (headline)' * row['headline']}")
    return "\n".join(lines)


def hardware() -> str:
    """Name of the CPU and number of cores."""
    machine = describe_machine()
    return f"{machine['cpu']}, {machine['cores']} cores"


def content(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a results file holds: the rows and where they were measured."""
    return {"date": now(), "hardware": hardware(), "torch": torch.__version__, "threads": 1, "results": list(rows)}


def plot(rows: Sequence[dict[str, Any]], backends: Sequence[str], size_mb: float, paths: Sequence[Path]) -> None:
    """Bars of the ratios of each case with a target at one size, and the targets; needs matplotlib."""
    chosen = [row for row in rows if row["size_mb"] == size_mb and row["target"] is not None]
    labels = list(dict.fromkeys(f"{row['codec']}\n{row['operation']}" for row in chosen))
    with canvas.drawing() as pyplot:
        figure, axes = pyplot.subplots(figsize=(10, 0.55 * len(labels) + 1.5))
        height = 0.8 / len(backends)
        for i, backend in enumerate(backends):
            ratios = [row["ratio"] for row in chosen if row["backend"] == backend]
            at = [k + (i - (len(backends) - 1) / 2) * height for k in range(len(labels))]
            axes.barh(at, ratios, height, label=backend)
        targets = [row["target"] for row in chosen if row["backend"] == backends[0]]
        for k, target in enumerate(targets):
            axes.plot([target, target], [k - 0.45, k + 0.45], color="black", label="target" if k == 0 else None)
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(f"speed in units of memcpy, {size_mb:g} MB of fp32, one thread")
        axes.legend(loc="lower right")
        axes.set_title(hardware(), fontsize=9)
        canvas.tidy(axes, "x")
        figure.tight_layout()
        canvas.save(figure, paths, dpi=120)

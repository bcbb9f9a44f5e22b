"""The table, the JSON file and the plot of the results."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

HEADER = (
    f"{'codec':<30} {'operation':<21} {'backend':<15} {'MB':>5} {'GB/s':>6} {'memcpy':>6} {'ratio':>6} {'target':>6}"
)


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    target = "" if row["target"] is None else f"{row['target']:.2f} {'pass' if row['met'] else 'MISS'}"
    return (
        f"{row['codec']:<30} {row['operation']:<21} {row['backend']:<15} {row['size_mb']:>5g} {row['gb_per_s']:>6.1f} "
        f"{row['memcpy_gb_per_s']:>6.1f} {row['ratio']:>6.2f} {target:>11}"
    )


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
    name, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        models = [text for text in info.read_text().splitlines() if text.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    return f"{name}, {os.cpu_count()} cores"


def write_json(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The rows and where they were measured."""
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "torch": torch.__version__,
        "threads": 1,
        "results": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def plot(rows: Sequence[dict[str, Any]], backends: Sequence[str], size_mb: float, paths: Sequence[Path]) -> None:
    """Bars of the ratios of each case with a target at one size, and the targets; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = [row for row in rows if row["size_mb"] == size_mb and row["target"] is not None]
    labels = list(dict.fromkeys(f"{row['codec']}\n{row['operation']}" for row in chosen))
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
    figure.tight_layout()
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    pyplot.close(figure)

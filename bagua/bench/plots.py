"""Figures of results: step time by bandwidth, by latency, by number of hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bagua.bench import conditions

__all__ = ["plot_report"]


class _Figure(NamedTuple):
    """One figure.

    Attributes:
        name: of its files.
        title, label: of the figure and its x axis.
        points: (x, row) of each point.
        log: whether the x axis is logarithmic.
    """

    name: str
    title: str
    label: str
    points: list[tuple[float, dict[str, Any]]]
    log: bool


def plot_report(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write a PNG and an SVG of each figure that `report` has the data for; returns their paths.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    rows = [row for row in report["rows"] if not row["error"]]
    figures = {"scaling": _of_scaling, "primitives": _of_primitives}.get(report["kind"], _of_tradeoff)(rows)
    folder.mkdir(parents=True, exist_ok=True)
    return [path for figure in figures for path in _draw(figure, report, folder)]


def _of_tradeoff(rows: Sequence[dict[str, Any]]) -> list[_Figure]:
    plain = [(conditions.parse(row["condition"]), row) for row in rows]
    plain = [each for each in plain if not each[0].jitter_s and each[0].slow == 1 and each[0].bits_per_s < math.inf]
    plain = [each for each in plain if not each[1]["entrant"].startswith("off")]
    by_speed = _largest(plain, lambda c: c.latency_s, lambda c: c.bits_per_s)
    by_delay = _largest(plain, lambda c: c.bits_per_s, lambda c: c.latency_s)
    found = []
    if by_speed:
        fixed = by_speed[0][0].latency_s
        points = [(c.bits_per_s / 1e6, row) for c, row in by_speed]
        title = f"Step time by bandwidth, {1000 * fixed:g} ms one way"
        found.append(_Figure("bandwidth", title, "bandwidth of a host, Mbit/s", points, True))
    if by_delay:
        fixed = by_delay[0][0].bits_per_s
        points = [(1000 * c.latency_s, row) for c, row in by_delay]
        title = f"Step time by latency, {fixed / 1e6:g} Mbit/s"
        found.append(_Figure("latency", title, "latency one way, ms", points, False))
    return found


def _largest(
    rows: Sequence[tuple[conditions.Condition, dict[str, Any]]],
    fixed: Callable[[conditions.Condition], float],
    varied: Callable[[conditions.Condition], float],
) -> list[tuple[conditions.Condition, dict[str, Any]]]:
    """The rows that share the value of `fixed` for which `varied` takes most values; none if that is one."""
    groups: dict[float, list[tuple[conditions.Condition, dict[str, Any]]]] = {}
    for each in rows:
        groups.setdefault(fixed(each[0]), []).append(each)
    best = max(groups.values(), key=lambda group: len({varied(c) for c, _ in group}), default=[])
    return best if len({varied(c) for c, _ in best}) > 1 else []


def _of_scaling(rows: Sequence[dict[str, Any]]) -> list[_Figure]:
    found = []
    for name in dict.fromkeys(row["condition"] for row in rows):
        points = [(float(r["hosts"]), r) for r in rows if r["condition"] == name and not r["entrant"].startswith("off")]
        if len({x for x, _ in points}) > 1:
            file = "scaling-" + name.replace("/", "-")
            found.append(_Figure(file, f"Step time by number of hosts, {name}", "hosts", points, False))
    return found


def _of_primitives(rows: Sequence[dict[str, Any]]) -> list[_Figure]:
    found = []
    for name in dict.fromkeys(row["condition"] for row in rows):
        points = [
            (row["size_bytes"] / 1024, {**row, "entrant": row["operation"], "step_ms": row["measured_ms"]})
            for row in rows
            if row["condition"] == name
        ]
        if len({x for x, _ in points}) > 1:
            file = "primitives-" + name.replace("/", "-")
            found.append(_Figure(file, f"Collectives, {name}", "KB", points, True))
    return found


def _draw(figure: _Figure, report: dict[str, Any], folder: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style: Any = {"font.size": 9, "font.family": "DejaVu Sans", "svg.fonttype": "none", "svg.hashsalt": "bagua"}
    with plt.rc_context(style):
        canvas, axes = plt.subplots(figsize=(10, 5.5), layout="constrained")
        for index, name in enumerate(dict.fromkeys(row["entrant"] for _, row in figure.points)):
            series = sorted((x, row) for x, row in _unique(figure.points, name).items())
            peer = series[0][1].get("family", "bagua") != "bagua" or name.startswith("torch")
            line = "--" if peer else "-"
            color = "black" if name in ("ddp", "torch all_reduce") else f"C{index % 10}"
            marker = "osv^DPX*<>"[index // 10 % 3 + 3 * (index % 3)]
            ys = [row["step_ms"] for _, row in series]
            axes.plot([x for x, _ in series], ys, line, marker=marker, markersize=4, color=color, label=name)
        axes.set_yscale("log")
        if figure.log:
            axes.set_xscale("log")
        ticks = sorted({x for x, _ in figure.points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        low, high = (limit(row["step_ms"] for _, row in figure.points) for limit in (min, max))
        steps = [digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5)]
        axes.set_ylim(low / 1.2, high * 1.2)
        axes.set_yticks(shown := [s for s in steps if low / 1.2 <= s <= high * 1.2], [f"{s:g}" for s in shown])
        axes.minorticks_off()
        axes.set_xlabel(figure.label)
        axes.set_ylabel("ms")
        axes.grid(color="#e4e6ea")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, borderaxespad=0)
        axes.set_title(f"{figure.title}\n{_subtitle(report)}", loc="left", fontsize=9)
        paths = [folder / f"{figure.name}.{kind}" for kind in ("png", "svg")]
        for path in paths:
            canvas.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(canvas)
    return paths


def _unique(points: Sequence[tuple[float, dict[str, Any]]], name: str) -> dict[float, dict[str, Any]]:
    return {x: row for x, row in points if row["entrant"] == name}


def _subtitle(report: dict[str, Any]) -> str:
    settings, model = report["settings"], report.get("model")
    words = [report["date"][:10]]
    if model:
        words.append(f"{model['name']}, {model['num_elements'] / 1e6:.1f} M fp32")
        words.append(f"{settings['compute_ms']:g} ms of emulated compute")
    if isinstance(settings["hosts"], int):
        words.append(f"{settings['hosts']} hosts")
    return ", ".join(words)

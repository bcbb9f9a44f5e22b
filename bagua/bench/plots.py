"""Figures of results: step time by bandwidth, by latency, by number of hosts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bagua.bench import canvas, conditions

__all__ = ["plot_report"]


# Colours and shapes that are told apart without colour vision too; a figure has no more lines than these.
_COLOURS = ("black", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8b4513")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
_FIRST = (
    "ddp",
    "ddp_powersgd",
    "post_local_sgd",
    "bytegrad",
    "int4",
    "qadam_1bit",
    "power_sgd",
    "local_sgd",
    "diloco",
)


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
    with canvas.drawing() as plt:
        picture, axes = plt.subplots(figsize=(10, 5.5), layout="constrained")
        names = _chosen(figure)
        for name, colour, marker in zip(names, _COLOURS, _MARKERS, strict=False):
            series = sorted((x, row) for x, row in _unique(figure.points, name).items())
            baseline = series[0][1].get("family", "bagua") != "bagua" or name.startswith("torch")
            ys = [row["step_ms"] for _, row in series]
            axes.plot(
                [x for x, _ in series],
                ys,
                "--" if baseline else "-",
                marker=marker,
                markersize=6,
                color=colour,
                label=name,
            )
        axes.set_yscale("log")
        if figure.log:
            axes.set_xscale("log")
        ticks = sorted({x for x, _ in figure.points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        drawn = [row["step_ms"] for _, row in figure.points if row["entrant"] in names]
        low, high = min(drawn), max(drawn)
        steps = [digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 3, 5)]
        axes.set_ylim(low / 1.2, high * 1.2)
        axes.set_yticks(shown := [s for s in steps if low / 1.2 <= s <= high * 1.2], [f"{s:g}" for s in shown])
        axes.minorticks_off()
        axes.set_xlabel(figure.label)
        axes.set_ylabel("ms")
        canvas.tidy(axes)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, borderaxespad=0)
        axes.set_title(f"{figure.title}\n{_subtitle(report)}\n{_honest(figure, names)}", loc="left", fontsize=9)
        return canvas.save(picture, [folder / f"{figure.name}.{kind}" for kind in ("png", "svg")])


def _chosen(figure: _Figure) -> list[str]:
    """The contenders that are drawn: as many as there are colours, those of `_FIRST` before the others."""
    names = list(dict.fromkeys(row["entrant"] for _, row in figure.points))
    ranks = {name: number for number, name in enumerate(_FIRST)}
    # One without all points of the others would be a shorter line, or a dot.
    full = max(len(_unique(figure.points, name)) for name in names)
    wanted = [name for name in names if len(_unique(figure.points, name)) == full]
    wanted.sort(key=lambda name: ranks.get(name, len(ranks)))
    kept = set(wanted[: len(_COLOURS)])
    return [name for name in names if name in kept]


def _honest(figure: _Figure, names: Sequence[str]) -> str:
    """How many points a line joins, and how many contenders are not drawn."""
    count = len({x for x, _ in figure.points})
    left_out = len({row["entrant"] for _, row in figure.points}) - len(names)
    words = f"{count} values measured, lines only join them"
    return words + (f"; {left_out} more in the table" if left_out else "")


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

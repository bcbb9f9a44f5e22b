"""Tables and figures of the convergence suite: at equal steps, against bytes and against time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bagua.bench.layout import markdown_table
from benchmarks.figures.axes import Axis, Panel
from benchmarks.figures.svg import COLOURS, GREY, Drawing, percent, signed

__all__ = [
    "BYTES_AND_TIME",
    "EQUAL_STEPS",
    "MISSES",
    "TARGETS",
    "Suite",
    "bytes_and_time",
    "draw_bytes",
    "draw_time",
    "equal_steps",
    "misses",
    "targets",
]

EQUAL_STEPS, BYTES_AND_TIME = "suite, equal steps", "suite, equal bytes and time"  # marks of the tables
MISSES, TARGETS = "suite, misses", "suite, targets"
_BASELINE = "gradient_allreduce"
_TASKS = {
    "conv": "convolutional net, SGD",
    "regression": "regression, SGD",
    "gpt": "GPT, AdamW",
    "vit": "vision transformer, AdamW",
}
_PAIRS = (("conv", "regression"), ("gpt", "vit"))
_FAMILIES = {"sgd": "SGD", "adamw": "AdamW", "lamb": "LAMB", "muon": "Muon"}
_BEYOND = 2.0  # standard deviations above the target that noise alone seldom makes
_LEAST, _MOST = -10.0, 30.0  # percent above the baseline, in the figures
_FEW_BITS = ("eden:bits=4", "eden:bits=2", "eden:bits=1")  # codecs in the table of targets, beside the defaults


class Suite:
    """A file of `python -m benchmarks.convergence.suite`.

    Attributes:
        path: in the repository.
        rows: as the suite summarises them.
        noise: by task the standard deviation of a gap between two runs of the baseline, in percent of loss.
    """

    def __init__(self, path: Path) -> None:
        self._data: dict[str, Any] = json.loads(path.read_text())
        self.path = f"benchmarks/results/{path.parent.name}/{path.name}"
        self.date: str = self._data["date"][:10]
        self.steps: int = self._data["settings"]["steps"]
        self.rows: list[dict[str, Any]] = self._data["rows"]
        self.verdicts: dict[str, str] = self._data["verdicts"]
        self.noise: dict[str, dict[str, Any]] = self._data.get("noise", {})

    def of(self, task: str, configuration: str) -> dict[str, Any] | None:
        """The summary of a row on a task; None if it has not run there."""
        found = (row for row in self.rows if (row["task"], row["configuration"]) == (task, configuration))
        return next(found, None)

    def compared(self, tasks: Iterable[str]) -> list[str]:
        """Configurations that have run on one of the tasks, without the baselines, by family."""
        rows = [row for row in self.rows if row["task"] in tasks and row["within"] is not None]
        rows.sort(key=lambda row: list(_FAMILIES).index(row["family"]))
        return list(dict.fromkeys(row["configuration"] for row in rows))

    def worst(self, setting: str, families: Iterable[str]) -> tuple[float, int]:
        """Return the percent of loss above the baseline's where a setting lost most, and of how many tasks.

        Raises:
            ValueError: it has not run to its end on all tasks of these families.
        """
        asked = [(task, family) for family in families for task in _PAIRS[family != "sgd"]]
        rows = [self.of(task, f"{setting}, {family}") for task, family in asked]
        behind = [row["behind"] for row in rows if row and row["loss"] is not None]
        if len(behind) < len(asked):
            raise ValueError(f"{self.path} lacks runs of {setting} with {', '.join(families)}")
        return max(behind), len(behind)

    def less(self, task: str, family: str) -> list[tuple[float, float]]:
        """Share of the steps, and percent of loss above the whole run of the baseline: means over the seeds."""
        ends: dict[float, dict[int, float]] = {}
        for run in self._data["runs"]:
            name, _, share = run["configuration"].removesuffix(" of the steps").partition(f"{_BASELINE}, {family}")
            if run["task"] == task and not name and (not share or share.startswith(", 1/")):
                ends.setdefault(1 / float(share.removeprefix(", 1/") or 1), {})[run["seed"]] = run["loss"]
        found: list[tuple[float, float]] = []
        for share, losses in sorted(ends.items()):
            behind = [100 * (loss / ends[1.0][seed] - 1) for seed, loss in losses.items() if seed in ends[1.0]]
            found += [(share, sum(behind) / len(behind))] if behind else []
        return found


def targets(suite: Suite) -> str:
    """A table of the algorithms at their defaults, and of few bits: whether each is within its target on each task."""
    few = {f"bytegrad codec={codec}" for codec in _FEW_BITS}
    rows = [row for row in suite.rows if row["within"] is not None and (_drawn(row) or row["label"] in few)]
    labels = sorted({row["label"] for row in rows}, key=lambda label: (label in few, label))
    table = []
    for label in labels:
        cells = []
        for task in _TASKS:
            made = [row for row in rows if (row["task"], row["label"]) == (task, label) and row["loss"] is not None]
            made.sort(key=lambda row: list(_FAMILIES).index(row["family"]))
            verdicts = [f"{'yes' if row['within'] else 'no'}, {signed(row['behind'])}{_beside(row)}" for row in made]
            cells.append("; ".join(verdicts))
        target = next(row["target"] for row in rows if row["label"] == label)
        table.append([f"`{label}`", *cells, f"{target:g} %"])
    return markdown_table(["setting", *map(_short, _TASKS), "target"], table) + "\n"


def _beside(row: Mapping[str, Any]) -> str:
    """The optimizer, where it is not the one of the task."""
    family = _FAMILIES[row["family"]]
    return "" if _TASKS[row["task"]].endswith(f", {family}") else f" ({family})"


def equal_steps(suite: Suite) -> str:
    """Tables of what each row has lost after all steps, and where the ranks' own weights have lost something else."""
    parts: list[str] = []
    for tasks in _PAIRS:
        head = ["optimizer", "setting"]
        for task in tasks:
            head += [f"{_short(task)}: loss, % above the baseline (worst seed)", "points of accuracy below"]
        table = [[*_names(suite, tasks, name), *_steps(suite, tasks, name)] for name in suite.compared(tasks)]
        parts.append(markdown_table([*head, "seeds", "target"], table))
    apart = [
        f"`{row['label']}` on the {_short(row['task'])} {signed(row['behind_own'])}"
        for row in suite.rows
        if row["within"] is not None and row["loss"] is not None and signed(row["behind_own"]) != signed(row["behind"])
    ]
    parts.append("Ranks' own weights: as the mean" + (f", but {'; '.join(apart)}" if apart else "") + ".")
    return "\n\n".join(parts) + "\n"


def _steps(suite: Suite, tasks: Sequence[str], name: str) -> list[str]:
    cells: list[str] = []
    found = [suite.of(task, name) for task in tasks]
    for row in found:
        if row is None or row["loss"] is None:
            cells += ["failed" if row and row["failed"] else "", ""]
            continue
        cells.append(f"{signed(row['behind'])} ({signed(row['worst'])})" + ("" if row["within"] else ", missed"))
        cells.append(signed(row["points_behind"]))
    target = next(row["target"] for row in found if row)
    seeds = "/".join(str(len(row["seeds"])) for row in found if row)
    return [*cells, seeds, f"{target:g} %"]


def misses(suite: Suite) -> str:
    """Tables of the noise of each task, and of the rows that miss their target: by how many standard deviations."""
    head = ["task", "runs of the baseline", "seeds", "standard deviation of a gap, % of loss"]
    table = [
        [words, str(noise["runs"]), str(len(noise["seeds"])), f"{noise['gap_sd']:.1f}"]
        for task, words in _TASKS.items()
        if (noise := suite.noise.get(task))
    ]
    parts = [markdown_table(head, table)]
    table = []
    for row in suite.rows:
        noise = suite.noise.get(row["task"])
        if noise and row["within"] is False and row["loss"] is not None:
            sds = (row["behind"] - row["target"]) / noise["gap_sd"] * math.sqrt(len(row["seeds"]))
            name = [_short(row["task"]), _FAMILIES[row["family"]], row["label"], signed(row["behind"])]
            beyond = "yes" if sds > _BEYOND else "no"
            table.append([*name, f"{row['target']:g} %", str(len(row["seeds"])), f"{sds:.1f}", beyond])
    head = ["task", "optimizer", "setting", "% above the baseline", "target", "seeds", "deviations above the target"]
    parts.append(markdown_table([*head, "beyond the noise"], table))
    return "\n\n".join(parts) + "\n"


def bytes_and_time(suite: Suite) -> str:
    """Tables of what each row sends and takes, and how far its loss is above that of the baseline with as much."""
    parts: list[str] = []
    for tasks in _PAIRS:
        head = ["optimizer", "setting"]
        for task in tasks:
            head += [f"{_short(task)}: bytes, % of DDP's", "loss at equal bytes, % above"]
            head += ["time, % of DDP's", "loss at equal time, % above"]
        table = [[*_names(suite, tasks, name), *_budgets(suite, tasks, name)] for name in suite.compared(tasks)]
        parts.append(markdown_table(head, table))
    return "\n\n".join(parts) + "\n"


def _budgets(suite: Suite, tasks: Sequence[str], name: str) -> list[str]:
    cells: list[str] = []
    for task in tasks:
        row = suite.of(task, name)
        if row is None or row["loss"] is None:
            cells += [""] * 4
            continue
        share = _time_share(suite, row)
        cells += [f"{100 * row['share_of_bytes']:.3g}", _optional(row["behind_bytes"])]
        cells += ["" if share is None else f"{100 * share:.0f}", _optional(row["behind_time"])]
    return cells


def _time_share(suite: Suite, row: Mapping[str, Any]) -> float | None:
    """Predicted time of a step, of the baseline's."""
    base = suite.of(row["task"], f"{_BASELINE}, {row['family']}")
    return row["step_ms"] / base["step_ms"] if row["step_ms"] and base and base["step_ms"] else None


def _optional(value: float | None) -> str:
    return "" if value is None else signed(value)


def _short(task: str) -> str:
    return _TASKS[task].partition(",")[0]


def _names(suite: Suite, tasks: Sequence[str], name: str) -> list[str]:
    row = next(row for row in (suite.of(task, name) for task in tasks) if row)
    return [_FAMILIES[row["family"]], row["label"]]


def draw_bytes(suite: Suite) -> Drawing:
    """Loss against the bytes that a rank sends."""
    x = Axis("bytes sent, share of DDP's", 1 / 4000, 2.5, (0.001, 0.01, 0.1, 1), log=True)
    return _draw(suite, "Loss against bytes", x, {row["configuration"] + row["task"]: row["share_of_bytes"]
                                                  for row in suite.rows})  # fmt: skip


def draw_time(suite: Suite) -> Drawing:
    """Loss against the time of the run on slow links."""
    x = Axis("time at 100 Mbit/s, share of DDP's", 1 / 14, 1.6, (0.1, 0.2, 0.5, 1), log=True)
    shares = {row["configuration"] + row["task"]: _time_share(suite, row) for row in suite.rows}
    return _draw(suite, "Loss against predicted time", x, shares)


def _draw(suite: Suite, title: str, x: Axis, shares: Mapping[str, float | None]) -> Drawing:
    """A panel for each task: points are algorithms at their defaults, the line is the baseline with less."""
    names = list(dict.fromkeys(row["label"] for row in suite.rows if _drawn(row)))
    lines = -(-len(names) // 2)
    drawing = Drawing(480, 560 + 16 * lines + 62, title)
    y = Axis("loss, % above DDP", _LEAST, _MOST, range(-10, 31, 10))
    for number, (task, words) in enumerate(_TASKS.items()):
        panel = Panel(drawing, 54 + 238 * (number % 2), 32 + 264 * (number // 2), 172, 190, x, y, words)
        family = "sgd" if task in _PAIRS[0] else "adamw"
        less = [(share, behind) for share, behind in suite.less(task, family) if share >= x.low]
        panel.curve([share for share, _ in less], [behind for _, behind in less], GREY, "4 3")
        for row in (row for row in suite.rows if row["task"] == task and _drawn(row)):
            share = shares[row["configuration"] + task]
            if share is None or row["behind"] is None:
                continue
            above = row["behind"] > _MOST
            at = panel.place(min(max(share, x.low), x.high), min(max(row["behind"], _LEAST), _MOST))
            place = names.index(row["label"])
            drawing.dot(*at, COLOURS[place % len(COLOURS)], 3.5, hollow=above)
            drawing.text(at[0] + 5, at[1] - 3, str(place + 1), size=10)
    for place, name in enumerate(names):
        left, top = 20 + 236 * (place // lines), 562 + 16 * (place % lines)
        drawing.dot(left, top - 4, COLOURS[place % len(COLOURS)], 3.5)
        drawing.text(left + 10, top, f"{place + 1}  {name}", size=11)
    seeds = sorted({len(row["seeds"]) for row in suite.rows if _drawn(row)})
    counted = f"{seeds[0]}" if seeds[0] == seeds[-1] else f"{seeds[0]} to {seeds[-1]}"
    notes = (
        "dashed: DDP with fewer steps; below it an algorithm learns more for as much",
        f"hollow: more than {percent(_MOST)}; all at their defaults, one_bit_lamb beside LAMB",
        f"{suite.steps} steps, 4 ranks, mean of {counted} seeds; {suite.date}",
    )
    for number, words in enumerate(notes):
        drawing.text(12, 562 + 16 * lines + 8 + 15 * number, words, size=11, colour=GREY)
    return drawing


def _drawn(row: Mapping[str, Any]) -> bool:
    """Whether it is an algorithm at its defaults."""
    return row["label"] == row["algorithm"] != _BASELINE and row["within"] is not None

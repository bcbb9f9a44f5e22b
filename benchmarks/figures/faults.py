"""Fault-tolerant training: what each host does while hosts are killed and come back, and a table of single faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bagua.bench.layout import markdown_table
from benchmarks.faults.report import chaos_misses, fault_misses
from benchmarks.faults.scenarios import SCENARIOS
from benchmarks.figures.svg import COLOURS, EDGE, GREY, GRID, INK, Drawing

__all__ = ["chaos_rows", "draw_timeline", "rows", "starts"]

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR, _SIZE = 420, 62, 12, 62, 28, 18, 14  # narrow, as the hero
_STATES = (("training", COLOURS[0]), ("waiting", COLOURS[1]), ("starting", COLOURS[4]), ("dead", GRID))
_COLOUR_OF = {"training": COLOURS[0], "stalled": COLOURS[1], "arriving": COLOURS[4]}
_OTHERS = {"elastic": "elastic mode", "torchelastic": "DDP under `torchrun`", "torchft": "torchft"}
_LEAST = 1.5  # pixels: a stall of a tenth of a second is seen


def rows(path: Path) -> str:
    """The table of single faults, seconds to the next step. A line for each system and number of hosts."""
    results = json.loads(path.read_text())
    found: dict[str, dict[str, dict[str, Any]]] = {}
    hosts = sorted({row["hosts"] for row in results["rows"]})
    for row in sorted(results["rows"], key=lambda row: row["hosts"]):
        system = f"`{row['algorithm']}`" if row["system"] == "bagua" else _OTHERS[row["system"]]
        system += f", {row['hosts']} hosts" if row["hosts"] != hosts[0] else ""
        found.setdefault(system, {})[row["fault"]] = row
    faults = [each for each in SCENARIOS if any(row["fault"] == each for row in results["rows"])]
    timed = [each for each in faults if any(row["fault"] == each and row["gap_s"] for row in results["rows"])]
    head = ("system", *(SCENARIOS[each].title for each in timed), "most steps lost", "back after", "missed")
    cells = []
    for system, by_fault in found.items():
        made = list(by_fault.values())
        back = [row["back_s"] for row in made if row["back_s"] is not None]
        missed = [f"{SCENARIOS[row['fault']].title}: {each}" for row in made for each in fault_misses(row)]
        lost = max((row["lost_steps"] or 0 for row in made), default=0)
        times = [_seconds(by_fault[each]["gap_s"]) if each in by_fault else "not run" for each in timed]
        cells.append([system, *times, str(lost), _seconds(max(back, default=None)), "; ".join(missed) or "nothing"])
    cells += [
        [_OTHERS[each["system"]], "not run: " + each["why"], *[""] * (len(head) - 2)] for each in results["not_run"]
    ]
    without = [SCENARIOS[each].title for each in faults if each not in timed]
    also = f"Played too, without a pause to time: {', '.join(without)}. " if without else ""
    loads = [row["load_1min"] for row in results["rows"]]
    cores = results["runs"][0]["machine"]["cores"]
    origin = f"`benchmarks/results/{path.parent.name}/{path.name}`, {' and '.join(map(str, hosts))} hosts"
    load = f"load {min(loads):.0f} to {max(loads):.0f} on {cores} cores"
    return f"{markdown_table(head, cells)}\n\n{also}{origin}, {load}.\n"


def starts(path: Path) -> str:
    """When what was killed trains again, with ranks that are forked and without. A line for each algorithm."""
    back: dict[str, dict[tuple[str, bool], float | None]] = {}
    for row in json.loads(path.read_text())["rows"]:
        back.setdefault(row["algorithm"], {})[row["fault"], row["preload"]] = row["back_s"]
    faults = ("kill-rank", "kill-host")
    head = ["algorithm", *(SCENARIOS[fault].title + end for fault in faults for end in ("", "; with `--preload`"))]
    cells = [
        [f"`{name}`", *(_seconds(found[fault, preload]) for fault in faults for preload in (False, True))]
        for name, found in back.items()
    ]
    return f"{markdown_table(head, cells)}\n\n`benchmarks/results/{path.parent.name}/{path.name}`.\n"


def chaos_rows(*paths: Path) -> str:
    """The table of random faults, a line for each algorithm. Several files: one after the other."""
    head = (
        *("algorithm", "hosts", "faults", "made an hour", "lost a fault", "throughput at 125 an hour"),
        *("live ranks in an exchange, mean", "longest stall", "loss beside undisturbed", "steps that differ", "missed"),
    )
    cells = []
    for row in (row for path in paths for row in json.loads(path.read_text())["chaos"]):
        ratio, made = row.get("loss_ratio"), row.get("made_per_hour")
        unequal = f"{row['unequal']} of {row['compared']}" if row["equal_expected"] else "by design"
        stall = row["longest_stall_s"] if "longest_stall_s" in row else max(row["stall_s"], default=None)
        cells.append(
            [
                *(f"`{row['algorithm']}`", str(row["hosts"]), str(row["faults"])),
                f"{row['per_hour'] if made is None else made:.0f}",
                *(_seconds(row["lost_s_per_fault"]), _percent(row["throughput_at_anchor"])),
                *(_percent(row["participation"]), _seconds(stall)),
                "not measured" if ratio is None else f"{100 * (ratio - 1):+.1f} %",
                *(unequal, "; ".join(chaos_misses(row)) or "nothing"),
            ]
        )
    origin = " and ".join(f"`benchmarks/results/{path.parent.name}/{path.name}`" for path in paths)
    return f"{markdown_table(head, cells)}\n\n{origin}.\n"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _timeline_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the chaos run of most hosts in a file of `benchmarks.faults`, and its timeline; the first of several."""
    results = json.loads(path.read_text())
    most = max(row["hosts"] for row in results["chaos"])
    return next(
        (row, timeline)
        for row, timeline in zip(results["chaos"], results["timelines"], strict=True)
        if row["hosts"] == most
    )


def draw_timeline(path: Path) -> Drawing:
    """One bar for each host, a mark for each fault."""
    row, timeline = _timeline_of(path)
    seconds, hosts = timeline["seconds"], timeline["hosts"]
    scale = (_WIDTH - _LEFT - _RIGHT) / seconds
    captions = [
        f"{row['algorithm']}, {len(hosts)} hosts, one rank each; {len(timeline['faults'])} faults,",
        f"{row['per_hour']:g} an hour; crosses: a rank or a host is killed",
        f"steps of {1000 * row['step_s']:.0f} ms; no rank is restarted but those that were killed",
        f"load {row['load_1min']:.0f} on 2 cores, {row['date'][:10]}",
    ]
    bottom = _TOP + _ROW * len(hosts)
    drawing = Drawing(_WIDTH, bottom + 46 + 16 * len(captions), "Ranks of a training under random faults")
    drawing.text(12, 26, "Training on while ranks and hosts are killed", bold=True, size=_SIZE)
    at = 12.0
    for name, colour in _STATES:
        drawing.box(at, 38, 12, 12, colour, EDGE if name == "dead" else "none", 2)
        drawing.text(at + 17, 49, name, size=13)
        at += 38 + 7 * len(name)
    for number, spans in enumerate(hosts):
        y = _TOP + _ROW * number
        drawing.text(_LEFT - 8, y + 14, f"host {number}", "end", 13)
        drawing.box(_LEFT, y, seconds * scale, _BAR, GRID, EDGE)
        for state, begin, end in sorted(spans, key=lambda span: span[0] == "stalled"):
            width = max((end - begin) * scale, _LEAST)
            drawing.box(_LEFT + begin * scale, y, width, _BAR, _COLOUR_OF[state])
    for _, host, when in timeline["faults"]:
        _cross(drawing, _LEFT + when * scale, _TOP + _ROW * host + _BAR / 2)
    for tick in range(0, int(seconds) + 1, _step(seconds)):
        drawing.line([(_LEFT + tick * scale, bottom - 6), (_LEFT + tick * scale, bottom)], GREY)
        drawing.text(_LEFT + tick * scale, bottom + 13, f"{tick} s", "middle", 12)
    for number, words in enumerate(captions):
        drawing.text(12, bottom + 36 + 16 * number, words, size=12, colour=GREY if number == 3 else INK)
    return drawing


def _cross(drawing: Drawing, x: float, y: float) -> None:
    for sign in (-1, 1):
        drawing.line([(x - 5, y - 5 * sign), (x + 5, y + 5 * sign)], INK, 2)


def _step(seconds: float) -> int:
    return next(each for each in (5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600) if seconds / each <= 6)

"""Tables of results, as text for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bagua.bench import held_out_tables, memory
from bagua.bench.layout import Columns, markdown_table

__all__ = ["HEAD", "cells", "document", "line", "markdown", "table", "text"]

HEAD = (
    "contender",
    "step ms",
    "quartiles",
    "x DDP",
    "MB/host",
    "exposed ms",
    "bound ms",
    "efficiency",
    "busy",
    "waits",
    "",
)
PRIMITIVE_HEAD = ("collective", "KB", "ms", "bound ms", "of the wire", "")
_DROPS = 1e-4  # of frames, from which the table says it
_STEPS = Columns(*zip((*HEAD[:-1], "", ""), (-36, 9, 15, 7, 9, 11, 9, 11, 6, 6, 2, 0), strict=True))
_PRIMITIVES = Columns(*zip((*PRIMITIVE_HEAD[:-1], "", ""), (-32, 12, 12, 12, 12, 2, 0), strict=True))


def cells(row: dict[str, Any]) -> list[str]:
    """The cells of one row, as strings."""
    if row["error"]:
        return [row["entrant"], "-", *[""] * (len(HEAD) - 3), f"error: {row['error']}"]
    remark = f"machine-limited: {row['limited']}" if row["limited"] else ""
    if row["condition"].find("/slow") >= 0:
        remark = "; ".join(filter(None, [remark, "by rank " + ", ".join(f"{each:.0f}" for each in row["rank_ms"])]))
    if (row.get("drop_share") or 0) >= _DROPS:
        remark = "; ".join(filter(None, [remark, f"the switch dropped {row['drop_share']:.2%} of frames"]))
    return [
        row["entrant"],
        f"{row['step_ms']:.0f}",
        f"{row['p25_ms']:.0f}-{row['p75_ms']:.0f}",
        _number(row["ratio_to_ddp"], 2),
        f"{row['bytes_per_host'] / 1e6:.2f}" + ("" if row["bytes_from"] == "device" else "*"),
        _number(row["exposed_ms"], 0),
        _number(row["bound_ms"], 0),
        _number(row["efficiency"], 2),
        _number(row["busy"], 2),
        _number(row["wait_share"], 2),
        remark,
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def line(row: Sequence[str]) -> str:
    """One line for a terminal."""
    return _STEPS.row([*row[:-1], "", row[-1]] if len(row) == len(HEAD) else row)


def text(rows: Sequence[dict[str, Any]]) -> str:
    """All rows, a table for each condition."""
    lines: list[str] = []
    for heading, chosen in _groups(rows):
        lines += ["", heading, line(HEAD), *(line(cells(row)) for row in chosen)]
    return "\n".join(lines)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """All rows as Markdown, a table for each condition."""
    blocks = [
        f"### {heading}\n\n" + table((*HEAD[:-1], "remarks"), [cells(row) for row in chosen])
        for heading, chosen in _groups(rows)
    ]
    return "\n\n".join(blocks)


def _groups(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    several = len({row.get("model") for row in rows}) > 1
    for row in rows:
        heading = f"{row['condition']}, {row['hosts']} hosts" + (f", {row['model']}" if several else "")
        found.setdefault(heading, []).append(row)
    return list(found.items())


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; numbers, which all but the first and the last column hold, to the right."""
    return markdown_table(head, rows, range(1, len(head) - 1))


def document(report: dict[str, Any]) -> str:
    """A whole report as Markdown: what was measured on what, then the tables."""
    machine, settings = report["machine"], report["settings"]
    facts = [
        f"{report['date'][:10]}, bagua {report['bagua']}, torch {machine['torch']}",
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']:.1f} at the start",
    ]
    if report["kind"] == "primitives":
        return _headed(facts, _primitives(report["rows"]))
    if report["kind"] == held_out_tables.KIND:
        facts += [*held_out_tables.facts(report), *(f"left out: {each}" for each in report["left_out"])]
        checked = "### Bytes on the wire\n\n" + held_out_tables.check_bytes(report["rows"])
        return _headed(facts, markdown(report["rows"]) + "\n\n" + checked)
    model, compute = report["model"], f"{settings['compute_ms']:g} ms of emulated compute"
    facts.append(f"{model['name']}: {model['num_elements']:,} fp32 elements in {model['num_layers']} layers, {compute}")
    if report["kind"] == "tradeoff":
        facts.append(f"{settings['hosts']} hosts, one rank each")
    facts += [f"left out: {each}" for each in report["left_out"]]
    return _headed(facts, markdown(report["rows"]) + memory.markdown(report["rows"]))


def _headed(facts: Sequence[str], body: str) -> str:
    return "\n".join(f"- {fact}" for fact in facts) + "\n\n" + body


def _primitives(rows: Sequence[dict[str, Any]]) -> str:
    blocks = []
    for condition in dict.fromkeys(row["condition"] for row in rows):
        chosen = [primitive_cells(row) for row in rows if row["condition"] == condition]
        blocks.append(f"### {condition}\n\n" + table((*PRIMITIVE_HEAD[:-1], "remarks"), chosen))
    return "\n\n".join(blocks)


def primitive_cells(row: dict[str, Any]) -> list[str]:
    """The cells of one row of `primitives`."""
    size = f"{row['size_bytes'] / 1024:.0f}"
    if row["error"]:
        return [row["operation"], size, "-", "", "", f"error: {row['error']}"]
    share = "" if row["efficiency"] is None else f"{row['efficiency']:.2f}"
    return [row["operation"], size, f"{row['measured_ms']:.2f}", f"{row['bound_ms']:.2f}", share, ""]


def primitive_line(words: Sequence[str]) -> str:
    """One line of `primitives` for a terminal."""
    return _PRIMITIVES.row([*words[:-1], "", words[-1]])

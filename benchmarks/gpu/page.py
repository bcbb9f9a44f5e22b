"""A Markdown page made from the JSON files of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["page", "summary"]


def summary(results: Sequence[dict[str, Any]]) -> str:
    """A table of the parts for a terminal."""
    lines = [f"{'part':<12} {'status':<8} {'s':>6}  why"]
    lines += [f"{each['part']:<12} {each['status']:<8} {each['seconds']:>6.0f}  {each['reason']}" for each in results]
    return "\n".join(lines)


def page(results: Sequence[dict[str, Any]], date: str, command: str) -> str:
    """The whole page."""
    dry = any(each["dry"] for each in results)
    lines = [f"# A run on one GPU, {date}" if not dry else f"# A dry run without a GPU, {date}", "", f"`{command}`", ""]
    if dry:
        lines += ["Made on a CPU with tiny sizes: it shows that the parts run, and nothing about a GPU.", ""]
    lines += _table(["part", "status", "seconds", "reason"], results)
    for each in results:
        lines += ["", f"## {each['part']}: {each['status']}", ""]
        lines += _table(["fact", "value"], [{"fact": key, "value": value} for key, value in each["facts"].items()])
        notable = [check for check in each["checks"] if check["status"] != "passed"]
        if notable:
            lines += ["", *_table(["name", "status", "detail"], notable)]
        for columns, rows in _groups(each["rows"]):
            lines += ["", *_table(columns, rows)]
    return "\n".join(lines) + "\n"


def _groups(rows: Sequence[dict[str, Any]]) -> list[tuple[list[str], list[dict[str, Any]]]]:
    """Rows with the same columns together."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row), []).append(row)
    return [(list(columns), same) for columns, same in found.items()]


def _table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in rows]


def _cell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")[:300]

"""Several results files as one: long grids are measured a condition at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["merged", "read_report", "resumed"]

KINDS = ("tradeoff", "held-out", "scaling", "primitives")
_ALIKE = (("kind",), ("bagua",), ("model",), ("machine", "cpu"), ("machine", "cores"), ("machine", "torch"))
_ALIKE_SETTINGS = ("hosts", "compute_ms", "forward_share", "emulated", "local")


def read_report(file: Path) -> dict[str, Any]:
    """Read what `bagua bench ... --json` wrote.

    Raises:
        ValueError: it cannot be read or is none; names the file.
    """
    try:
        report = json.loads(file.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(report, dict) or report.get("kind") not in KINDS:
        raise ValueError(f"{file}: not written by bagua bench {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    return report


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """Read reports of one machine and one model and put their rows together.

    Returns:
        the first report with the rows and conditions of all; its date and settings are the first's.

    Raises:
        ValueError: a file is no report, or they do not fit together; names the file and what differs.
    """
    reports = [read_report(file) for file in files]
    first = reports[0]
    rows, conditions = list(first["rows"]), list(first["settings"].get("conditions", ()))
    for file, report in zip(files[1:], reports[1:], strict=True):
        for keys in (*_ALIKE, *(("settings", key) for key in _ALIKE_SETTINGS)):
            mine, theirs = _at(first, keys), _at(report, keys)
            if mine != theirs:
                raise ValueError(f"{file}: {'.'.join(keys)} is {theirs!r}, in {files[0]} {mine!r}")
        taken = {_name(row) for row in rows}
        twice = next((name for row in report["rows"] if (name := _name(row)) in taken), None)
        if twice is not None:
            raise ValueError(f"{file}: {', '.join(map(str, twice))} is in an earlier file too")
        rows += report["rows"]
        conditions += report["settings"].get("conditions", ())
    return {**first, "settings": {**first["settings"], "conditions": conditions}, "rows": rows}


def resumed(earlier: dict[str, Any], report: dict[str, Any], file: Path) -> dict[str, Any]:
    """Put the rows of `report` behind those of `earlier`, a report of `file` with the same settings.

    Raises:
        ValueError: they differ in more than the conditions; names `file` and what differs.
    """
    report = json.loads(json.dumps(report))  # tuples are lists in a file
    mine, theirs = earlier["settings"], report["settings"]
    differ = [key for key in theirs if key != "conditions" and mine.get(key) != theirs[key]]
    for keys in _ALIKE:
        differ += [".".join(keys)] if _at(earlier, keys) != _at(report, keys) else []
    if differ:
        raise ValueError(f"{file}: measured with another {', '.join(differ)}; it cannot be resumed")
    there = {each["name"] for each in mine["conditions"]}  # a report has all conditions that were asked for
    added = [each for each in theirs["conditions"] if each["name"] not in there]
    settings = {**theirs, "conditions": [*mine["conditions"], *added]}
    return {**earlier, "settings": settings, "rows": [*earlier["rows"], *report["rows"]]}


def _at(report: dict[str, Any], keys: Sequence[str]) -> Any:
    for key in keys:
        report = report.get(key, {})
    return report


def _name(row: dict[str, Any]) -> tuple[Any, ...]:
    keys = ("condition", "hosts", "entrant", "operation", "size_bytes")
    return tuple(row[key] for key in keys if key in row)

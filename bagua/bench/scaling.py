"""`bagua bench scaling`: the same contenders on a growing number of hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bagua.bench import tradeoff
from bagua.bench.tradeoff import Plan

__all__ = ["CONDITIONS", "HOSTS", "run"]

CONDITIONS = "1gbit/1ms"
HOSTS = (2, 4, 8, 16)


def run(
    plans: Sequence[Plan], folder: Path | None, told: Callable[[str], None], keep: Callable[[dict[str, Any]], None]
) -> None:
    """Run each plan, which differ in the number of hosts; the arguments are those of `tradeoff.run`."""
    before: list[dict[str, Any]] = []
    for plan in plans:
        told(f"\n{plan.hosts} hosts")
        latest: dict[str, Any] = {}
        tradeoff.run(plan, folder, told, partial(_join, plans, before, latest, keep))
        before = latest.get("rows", before)


def _join(
    plans: Sequence[Plan],
    before: list[dict[str, Any]],
    latest: dict[str, Any],
    keep: Callable[[dict[str, Any]], None],
    report: dict[str, Any],
) -> None:
    """Put the rows of fewer hosts in front of those of `report`."""
    settings = {**report["settings"], "hosts": [each.hosts for each in plans]}
    latest |= {**report, "kind": "scaling", "settings": settings, "rows": [*before, *report["rows"]]}
    keep(latest)

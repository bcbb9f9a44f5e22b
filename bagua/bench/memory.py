"""Peak memory of a rank of each contender, in processes that run nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bagua.bench.hosts import LocalHosts
from bagua.bench.layout import Columns, markdown_table
from bagua.bench.measure import Job
from bagua.bench.runner import run_cases

__all__ = ["HEAD", "cells", "markdown", "measure", "text"]

HEAD = ("contender", "peak MB", "beyond DDP, MB", "x DDP")
_COLUMNS = Columns(*zip(HEAD, (-36, 10, 16, 8), strict=True))
_DDP = "ddp"
_STEPS = 4
_COMPUTE_MS = 5.0  # what a step needs of memory does not depend on its time


def measure(
    names: Sequence[str], hosts: int, job: Job, timeout_s: float, told: Callable[[str], None]
) -> dict[str, int]:
    """Peak bytes of the rank with most, by contender; a contender that fails is left out.

    Plain processes on the loopback device: buffers do not depend on the link. Steps of whole periods.

    Args:
        job: settings of the training.
        told: called with each line for the terminal.
    """
    found: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        this = replace(job, cases=((0, name),), steps=_STEPS, budget_s=1.0, compute_ms=_COMPUTE_MS, profile="")
        (outcome,) = run_cases(partial(LocalHosts, hosts), hosts, this, timeout_s, lambda _: None)
        if outcome.error:
            told(f"{name:<36}        -  [{number}/{len(names)}] {outcome.error}")
            continue
        found[name] = max(rank["peak_bytes"] for rank in outcome.ranks)
        told(f"{name:<36}{found[name] / 1e6:9.1f} MB  [{number}/{len(names)}]")
    return found


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The cells of a table, one row for each contender that was measured."""
    peaks = {row["entrant"]: row["memory_bytes"] for row in rows if row.get("memory_bytes") is not None}
    ddp = peaks.get(_DDP)
    return [
        [name, f"{peak / 1e6:.0f}", *(["", ""] if ddp is None else [f"{(peak - ddp) / 1e6:+.0f}", f"{peak / ddp:.2f}"])]
        for name, peak in peaks.items()
    ]


def text(rows: Sequence[dict[str, Any]]) -> str:
    """A table for a terminal."""
    return _COLUMNS.table(cells(rows))


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A section with a table, or nothing where no memory was measured."""
    found = cells(rows)
    return "\n\n### Peak memory of a rank\n\n" + markdown_table(HEAD, found, (1, 2, 3)) if found else ""

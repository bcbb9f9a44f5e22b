"""Results of an earlier run, of which some configurations were run again."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.convergence.configurations import Configuration, all_configurations
from benchmarks.convergence.training import Outcome

__all__ = ["combine", "outcome_of", "read", "without_known_bases"]


def read(path: Path, quick: bool) -> list[Outcome]:
    """Return the runs of a file that `--json` wrote; those of configurations that are no more are left out.

    Raises:
        ValueError: it was made with another choice of `--quick`.
    """
    data = json.loads(path.read_text())
    if data["quick"] is not quick:
        raise ValueError(f"{path}: made {'with' if data['quick'] else 'without'} --quick; the two cannot be merged")
    known = {each.name for each in all_configurations()}
    return [outcome_of(run) for run in data["runs"] if run["configuration"] in known]


def outcome_of(run: dict[str, Any]) -> Outcome:
    """Return a run as `to_json` wrote it: JSON has null for what is not finite, and lists."""
    finite = {key: math.nan if value is None else value for key, value in run.items()}
    curves = {key: tuple(math.nan if each is None else each for each in run[key]) for key in run if "curve" in key}
    return Outcome(**{**finite, **curves})


def without_known_bases(
    chosen: Sequence[Configuration], named: Sequence[str], earlier: Sequence[Outcome], tasks: Sequence[str]
) -> list[Configuration]:
    """Leave out DDP where `earlier` has it on all `tasks`, unless it was asked for by its name."""
    have = {(each.task, each.configuration) for each in earlier}
    return [
        each
        for each in chosen
        if each.algorithm or each.name in named or any((task, each.name) not in have for task in tasks)
    ]


def combine(earlier: Sequence[Outcome], now: Sequence[Outcome]) -> list[Outcome]:
    """Return all runs; a task and configuration of `now` replaces all of its runs in `earlier`."""
    again = {(each.task, each.configuration) for each in now}
    return [each for each in earlier if (each.task, each.configuration) not in again] + list(now)

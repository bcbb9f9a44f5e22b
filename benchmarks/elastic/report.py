"""Results of `benchmarks.elastic`: merged from several files, as lines and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bagua.bench.layout import markdown_table

__all__ = ["TITLES", "add", "summary", "table"]

TITLES = {
    "kill-rank": "a rank is killed, 3 hosts",
    "kill-host": "a host is killed, 3 hosts",
    "kill-host-0": "the host of rank 0 and of the rendezvous is killed, 3 hosts",
    "host-returns": "4 hosts, one is killed (any, the first too) and returns",
}
_HEAD = (
    "accident",
    "runs",
    "hung",
    "good",
    "steps lost, at most",
    "images repeated in a run, at most",
    "seconds to the next step: median (range)",
    "test accuracy, %: mean (range)",
    "undisturbed",
)


def add(done: dict[str, Any], more: dict[str, Any]) -> None:
    """Put into `done` what it does not have: runs by scenario and seed, undisturbed trainings by epochs and seed."""
    _extend(done["runs"], more["runs"], ("scenario", "seed"))
    _extend(done["undisturbed"], more["undisturbed"], ("epochs", "seed"))


def _extend(mine: list[dict[str, Any]], theirs: Iterable[dict[str, Any]], names: tuple[str, str]) -> None:
    have = {tuple(each[name] for name in names) for each in mine}
    mine += [each for each in theirs if tuple(each[name] for name in names) not in have]
    mine.sort(key=lambda each: tuple(each[name] for name in names))


def summary(done: dict[str, Any]) -> list[str]:
    """A line for each scenario."""
    lines: list[str] = []
    for scenario, runs in _by_scenario(done):
        good, hung = _counts(runs)
        lines.append(
            f"{scenario}: {good} of {len(runs)} good, {hung} hung; lost at most {_lost(runs)} steps; "
            f"accuracy {_percent(each['accuracy'] for each in runs)}"
        )
    for epochs in sorted({each["epochs"] for each in done["undisturbed"]}):
        right = [each["accuracy"] for each in done["undisturbed"] if each["epochs"] == epochs]
        lines.append(f"undisturbed, {epochs} epochs: {len(right)} runs; accuracy {_percent(right)}")
    return lines


def table(done: dict[str, Any], epochs: int = 6) -> list[str]:
    """Markdown. Undisturbed trainings are those of as many epochs: twice `epochs` where a host returns."""
    rows: list[list[str]] = []
    for scenario, runs in _by_scenario(done):
        good, hung = _counts(runs)
        length = epochs * 2 if scenario == "host-returns" else epochs
        alone = [each["accuracy"] for each in done["undisturbed"] if each["epochs"] == length]
        cells = [
            TITLES[scenario],
            *(str(len(runs)), str(hung), str(good), str(_lost(runs))),
            str(max(each["repeated"] for each in runs)),
            _spread([each["recovered_s"] for each in runs], statistics.median, ".0f"),
            _percent(each["accuracy"] for each in runs),
            f"{_percent(alone)} of {len(alone)}",
        ]
        rows.append(cells)
    return markdown_table(_HEAD, rows).splitlines()


def _by_scenario(done: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    runs = ((scenario, [each for each in done["runs"] if each["scenario"] == scenario]) for scenario in TITLES)
    return [(scenario, found) for scenario, found in runs if found]


def _counts(runs: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Good ones, hung ones."""
    return sum(not each["problems"] for each in runs), sum(each["hung"] for each in runs)


def _lost(runs: Sequence[dict[str, Any]]) -> int:
    return max((steps for each in runs for steps in each["lost_steps"]), default=0)


def _percent(values: Iterable[float | None]) -> str:
    return _spread([None if each is None else 100 * each for each in values], statistics.mean, ".1f")


def _spread(values: Sequence[float | None], middle: Callable[[list[float]], float], form: str) -> str:
    """The middle, and the range."""
    known = [each for each in values if each is not None]
    if not known:
        return "none"
    return f"{middle(known):{form}} ({min(known):{form}} to {max(known):{form}})"

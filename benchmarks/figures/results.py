"""The newest results of each kind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "Convergence", "Tradeoff", "all_of", "newest"]

RESULTS = Path(__file__).resolve().parents[1] / "results"
_DRAWN = ("1gbit/0ms", "1gbit/5ms")  # on slower links steps are ten times as long: no scale would show both
BASELINES = {"sgd": "torch DDP", "adam": "torch DDP, adam", "lamb": "torch DDP, lamb"}


def newest(kind: str, file: str) -> Path:
    """Return the file of the last dated folder of that kind.

    Raises:
        FileNotFoundError: there is none.
    """
    return all_of(kind, file)[-1]


def all_of(kind: str, file: str) -> list[Path]:
    """Return the files of all dated folders of that kind, the newest last.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(RESULTS.glob(f"*-{kind}/{file}"))
    if not found:
        raise FileNotFoundError(f"no {file} in {RESULTS}/*-{kind}")
    return found


@dataclass(frozen=True)
class Curve:
    """Losses on held-out data, of several seeds: their mean, least and greatest after so many steps."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


class Convergence:
    """What `python -m benchmarks.convergence` wrote."""

    def __init__(self, path: Path) -> None:
        self._data: dict[str, Any] = json.loads(path.read_text())
        self.name: str = path.parent.name
        self.date: str = self._data["date"][:10]
        self.ranks: int = self._data["ranks"]
        self.seeds: int = self._data["seeds"]

    def of_algorithm(self, name: str) -> list[str]:
        """Names of the configurations of an algorithm."""
        return [key for key, value in self._data["configurations"].items() if value.get("algorithm") == name]

    def compared(self) -> list[str]:
        """Names of all configurations but DDP's own."""
        return [key for key, value in self._data["configurations"].items() if value.get("algorithm")]

    def baseline(self, configuration: str) -> str:
        """DDP with the same optimizer."""
        return BASELINES[self._data["configurations"][configuration]["family"]]

    def curve(self, task: str, configuration: str) -> Curve:
        """The curves of all seeds."""
        runs = [r for r in self._data["runs"] if (r["task"], r["configuration"]) == (task, configuration)]
        columns = list(zip(*(run["curve_loss"] for run in runs), strict=True))
        return Curve(
            runs[0]["curve_steps"],
            [sum(column) / len(column) for column in columns],
            [min(column) for column in columns],
            [max(column) for column in columns],
        )

    def row(self, task: str, configuration: str) -> dict[str, Any]:
        """The final figures: "mean", "difference" from DDP and others."""
        return next(r for r in self._data["rows"] if (r["task"], r["configuration"]) == (task, configuration))


class Tradeoff:
    """What `bagua bench tradeoff` wrote."""

    def __init__(self, path: Path) -> None:
        self._data: dict[str, Any] = json.loads(path.read_text())
        self.name: str = path.parent.name
        self.date: str = self._data["date"][:10]
        self.all_conditions: list[str] = list(dict.fromkeys(row["condition"] for row in self._data["rows"]))
        drawn = [name for name in _DRAWN if name in self.all_conditions]
        self.conditions: list[str] = drawn or self.all_conditions
        self.hosts: int = self._data["settings"]["hosts"]
        self.num_elements: int = self._data["model"]["num_elements"]

    def row(self, condition: str, entrant: str) -> dict[str, Any] | None:
        """The figures of an entrant; None if it was not measured or failed."""
        found = [r for r in self._data["rows"] if (r["condition"], r["entrant"]) == (condition, entrant)]
        return found[0] if found and not found[0]["error"] and found[0]["step_ms"] else None

    def entrants(self) -> list[str]:
        """Those that were measured under all conditions."""
        names = dict.fromkeys(row["entrant"] for row in self._data["rows"])
        return [name for name in names if all(self.row(condition, name) for condition in self.conditions)]

    def speedup(self, condition: str, entrant: str) -> float | None:
        """How many times faster than DDP."""
        row = self.row(condition, entrant)
        return row["ratio_to_ddp"] if row else None

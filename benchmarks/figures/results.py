"""The newest results of each kind."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "TORCH", "Convergence", "Tradeoff", "all_of", "newest", "newest_complete", "timed"]

RESULTS = Path(__file__).resolve().parents[1] / "results"
_DRAWN = ("1gbit/0ms", "1gbit/5ms")  # on slower links steps are ten times as long: no scale would show both
# All that torch itself offers for DDP. A comparison that lacks one of them is not shown.
TORCH = ("ddp", "ddp_fp16", "ddp_bf16", "ddp_powersgd", "post_local_sgd")
# How far above DDP's the loss on the digits may end, in percent. It was set after the runs: accuracy alone called runs
# good whose loss was twice as high.
DIGITS_LOSS_TARGET = 25.0
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


def newest_complete(condition: str) -> Tradeoff:
    """Return the newest run that has all of `TORCH` under that condition.

    Raises:
        FileNotFoundError: no run has.
    """
    for path in reversed(all_of("bench", "tradeoff.json")):
        results = Tradeoff(path)
        if all(results.row(condition, name) for name in TORCH):
            return results
    raise FileNotFoundError(f"no run has all of {', '.join(TORCH)} at {condition}")


def timed(condition: str, entrant: str) -> Tradeoff:
    """Return the run that an entrant's speed-up is of.

    That is the newest one with all of torch's hooks, or, for an entrant with options, the newest one of such.

    Raises:
        FileNotFoundError: there is none.
    """
    return Tradeoff(newest("advice", "tradeoff.json")) if ":" in entrant else newest_complete(condition)


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
        """The final figures: "mean", "difference" from DDP (positive is worse) and others."""
        return next(r for r in self._data["rows"] if (r["task"], r["configuration"]) == (task, configuration))

    def settings(self, configuration: str) -> dict[str, Any]:
        """The algorithm's name as "algorithm", its options, and the kind of "optimizer"."""
        found = self._data["configurations"][configuration]
        options = found.get("options", {})
        options = ast.literal_eval(options) if isinstance(options, str) else options
        return {"algorithm": found["algorithm"], "optimizer": found.get("optimizer") or found["family"], **options}

    def digits_loss(self, configuration: str) -> float:
        """Mean loss on the digits at the end, of all seeds."""
        key = ("digits", configuration)
        losses = [run["loss"] for run in self._data["runs"] if (run["task"], run["configuration"]) == key]
        return sum(losses) / len(losses)

    def digits_loss_behind(self, configuration: str) -> float:
        """By how many percent that loss is above DDP's with the same optimizer."""
        return 100 * (self.digits_loss(configuration) / self.digits_loss(self.baseline(configuration)) - 1)

    def misses(self, configuration: str) -> set[str]:
        """Which of "accuracy", "digits loss" and "text" miss their target."""
        found = {
            "accuracy": not self.row("digits", configuration)["within"],
            "digits loss": self.digits_loss_behind(configuration) > DIGITS_LOSS_TARGET,
            "text": not self.row("char_lm", configuration)["within"],
        }
        return {name for name, missed in found.items() if missed}


class Tradeoff:
    """What `bagua bench tradeoff` wrote."""

    def __init__(self, path: Path) -> None:
        self._data: dict[str, Any] = json.loads(path.read_text())
        self.name: str = path.parent.name
        self.path: str = f"benchmarks/results/{path.parent.name}/{path.name}"
        self.date: str = self._data["date"][:10]
        self.all_conditions: list[str] = list(dict.fromkeys(row["condition"] for row in self._data["rows"]))
        drawn = [name for name in _DRAWN if name in self.all_conditions]
        self.conditions: list[str] = drawn or self.all_conditions
        self.hosts: int = self._data["settings"]["hosts"]
        self.num_elements: int = self._data["model"]["num_elements"]
        self.cpu: str = self._data["machine"]["cpu"].replace("(R)", "")

    def row(self, condition: str, entrant: str) -> dict[str, Any] | None:
        """The figures of an entrant; None if it was not measured or failed."""
        found = [r for r in self._data["rows"] if (r["condition"], r["entrant"]) == (condition, entrant)]
        return found[0] if found and not found[0]["error"] and found[0]["step_ms"] else None

    def entrants(self) -> list[str]:
        """Those that were measured under all conditions."""
        names = dict.fromkeys(row["entrant"] for row in self._data["rows"])
        return [name for name in names if all(self.row(condition, name) for condition in self.conditions)]

    def limited(self, condition: str, entrant: str) -> str:
        """Why the machine and not the link may have been the limit; "" if it was not."""
        row = self.row(condition, entrant)
        return row["limited"] if row else ""

    def reference_ms(self, condition: str) -> float:
        """The step time that speed-ups refer to.

        The lower one of torch's DDP and `gradient_allreduce`, which send the same bytes: a DDP run that the machine
        disturbed makes nothing look faster than it is.
        """
        rows = [self.row(condition, name) for name in ("ddp", "gradient_allreduce")]
        return min(row["step_ms"] for row in rows if row)

    def speedup(self, condition: str, entrant: str, exact_share: float = 0.0) -> float | None:
        """How many times faster than the reference; None if it was not measured.

        Args:
            condition, entrant: which row.
            exact_share: share of the steps that take as long as the reference, for optimizers with an exact warm-up:
                1 / (share / 1 + (1 - share) / r) for a row that is r times faster.
        """
        row = self.row(condition, entrant)
        if row is None:
            return None
        ratio = self.reference_ms(condition) / row["step_ms"]
        return 1 / (exact_share + (1 - exact_share) / ratio)

    def best_of_torch(self, condition: str) -> str:
        """The entrant of `TORCH` with the shortest step."""
        rows = {name: self.row(condition, name) for name in TORCH}
        return min((row["step_ms"], name) for name, row in rows.items() if row)[1]

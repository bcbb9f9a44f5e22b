"""A long chaos run in parts: one job after the other, so that it can be stopped and gone on with at any time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bagua.bench import progress
from benchmarks.faults.chaos import ANCHOR_PER_HOUR, chaos, undisturbed
from benchmarks.faults.job import Job, Stuck
from benchmarks.faults.systems import Settings

__all__ = ["BEFORE", "LOSSES_EVERY", "Rounds", "combine", "missing"]

LOSSES_EVERY = 100  # steps; a round ends after a multiple of it, so that one undisturbed training is beside all
BEFORE = {"stage_steps": 200, "preload": False}  # what rows of before do not say
_SUMS = ("faults", "chaos_s", "lost_s", "exchanges", "exchanges_below_90", "compared", "unequal", "splits", "steps")


@dataclass(frozen=True)
class Rounds:
    """A chaos run of several jobs.

    Attributes:
        settings: of each.
        faults: of all rounds together.
        of_each: faults of one round; the last one may have fewer.
        per_hour: of the Poisson process.
        seed: of the first round's times and victims; the next one has the next seed.
        limit_s: for whatever is awaited.
        calm_s: without faults, before the first one and after the last one of a round.
    """

    settings: Settings
    faults: int
    of_each: int
    per_hour: float
    seed: int = 0
    limit_s: float = 180.0
    calm_s: float = 10.0

    @property
    def facts(self) -> dict[str, Any]:
        """By which the rows of a file that belong to it are known."""
        names = ("algorithm", "hosts", "step_ms", "bandwidth", "table", "stage_steps", "preload")
        facts: dict[str, Any] = {name: getattr(self.settings, name) for name in names}
        return {**facts, "per_hour": self.per_hour, "of_each": self.of_each}

    def go_on(
        self, found: dict[str, Any], most: int, mark: Callable[[], dict[str, Any]], keep: Callable[[], None]
    ) -> int:
        """Measure what `found` lacks of it; return how many jobs that took.

        Args:
            found: "rounds", a row for each job; "losses", of trainings without faults; "chaos" and "timelines", which
                get one row and the first round's timeline for all rounds together.
            most: jobs now, the training without faults included; 0: all that are missing.
            mark: facts for the next row.
            keep: called when there is something new.
        """
        jobs = 0
        while not most or jobs < most:
            rows = self._mine(found["rounds"])
            left = missing(rows, self.faults)
            if left:
                number = len(rows)
                progress.show(f"{self.settings.algorithm}: round {number + 1}, {left} faults are left")
                row, timeline = chaos(
                    self.settings, min(left, self.of_each), self.per_hour, self.seed + number,
                    self.limit_s, self.calm_s, multiple=LOSSES_EVERY,
                )  # fmt: skip
                found["rounds"].append({**row, **self.facts, "round": number, **mark()})
                self._combine(found, None if rows else timeline)
            elif self._losses(found) is None:
                found["losses"].append({**self.facts, "losses": self._undisturbed(rows), **mark()})
                self._combine(found, None)
            else:
                break
            jobs += 1
            keep()
        return jobs

    def row(self, found: dict[str, Any]) -> dict[str, Any]:
        """That of all rounds together."""
        return self._mine(found["chaos"])[0]

    def _mine(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if all({**BEFORE, **row}.get(key) == value for key, value in self.facts.items())]

    def _losses(self, found: dict[str, Any]) -> dict[str, float] | None:
        """Of the training without faults, by the number of steps; None if there is none that is long enough."""
        longest = max((row["steps"] for row in self._mine(found["rounds"])), default=0)
        losses = [row["losses"] for row in self._mine(found["losses"]) if str(longest) in row["losses"]]
        return losses[-1] if losses else None

    def _combine(self, found: dict[str, Any], timeline: dict[str, Any] | None) -> None:
        rows = self._mine(found["rounds"])
        whole = {**combine(rows, self._losses(found) or {}), **self.facts, "date": rows[-1]["date"]}
        whole["load_1min"] = statistics.fmean(row["load_1min"] for row in rows)
        places = [place for place, row in enumerate(found["chaos"]) if self._mine([row])]
        if places:
            found["chaos"][places[0]] = whole
            found["timelines"][places[0]] = timeline or found["timelines"][places[0]]
        else:
            assert timeline is not None
            found["chaos"].append(whole)
            found["timelines"].append(timeline)

    def _undisturbed(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Losses of as many steps as the longest round has made."""
        steps = max(row["steps"] for row in rows)
        progress.show(f"{self.settings.algorithm}: undisturbed, {steps} steps")
        settings = replace(undisturbed(self.settings), losses_every=LOSSES_EVERY)
        with Job(settings, self.limit_s + steps) as job:
            job.stop_at(steps)
            job.await_end()
            told: dict[int, list[float]] = {}
            for process in job.journals.update():
                for step, loss in process.losses.items():
                    told.setdefault(step, []).append(loss)
        if steps not in told:
            raise Stuck(f"undisturbed: no loss after {steps} steps")
        return {str(step): statistics.fmean(each) for step, each in sorted(told.items())}


def missing(rows: Sequence[dict[str, Any]], faults: int) -> int:
    """Return how many faults of a run have not been made yet. A round that got stuck counts with those that it made."""
    return max(faults - sum(row["faults"] for row in rows), 0)


def combine(rows: Sequence[dict[str, Any]], losses: dict[str, float]) -> dict[str, Any]:
    """Return one row for several rounds.

    Sums and means are over all rounds, growth is that of the process that has grown most, and the ratio of losses is
    the mean over the rounds that have ended.

    Args:
        losses: of the training without faults, by the number of steps.
    """
    whole: dict[str, Any] = {name: sum(row[name] or 0 for row in rows) for name in _SUMS}
    timed = [row for row in rows if row["throughput"] is not None]
    seconds = sum(row["chaos_s"] for row in timed)
    whole["throughput"] = sum(row["throughput"] * row["chaos_s"] for row in timed) / seconds if seconds else None
    known = sum(row["faults"] for row in rows if row["lost_s"] is not None)
    whole["lost_s_per_fault"] = per_fault = whole["lost_s"] / known if known else None
    whole["throughput_at_anchor"] = None if per_fault is None else 1 - per_fault * ANCHOR_PER_HOUR / 3600
    whole["made_per_hour"] = 3600 * whole["faults"] / whole["chaos_s"] if whole["chaos_s"] else None
    took_part = [row for row in rows if row["participation"] is not None]
    whole["participation"] = (
        sum(row["participation"] * row["exchanges"] for row in took_part) / whole["exchanges"] if took_part else None
    )
    steps = [row["step_s"] for row in rows if row["step_s"] is not None]
    whole["step_s"] = statistics.fmean(steps) if steps else None
    whole["longest_stall_s"] = max((stall for row in rows for stall in row["stall_s"]), default=None)
    whole["equal_expected"] = rows[0]["equal_expected"]
    whole["growth"] = {
        key: max(row["growth"][key] for row in rows if key in row["growth"])
        for key in dict.fromkeys(key for row in rows for key in row["growth"])
    }
    whole["rounds"] = len(rows)
    whole["problems"] = [
        f"round {number}: {problem}" for number, row in enumerate(rows, 1) for problem in row["problems"]
    ]
    pairs = [(row["loss"], losses[str(row["steps"])]) for row in rows if "loss" in row and str(row["steps"]) in losses]
    if pairs:
        whole["loss"], whole["undisturbed_loss"] = (statistics.fmean(column) for column in zip(*pairs, strict=True))
        whole["loss_ratio"] = statistics.fmean(loss / there for loss, there in pairs)
    return whole

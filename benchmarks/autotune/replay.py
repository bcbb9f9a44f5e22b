"""Which search? Each of them, many times, on recorded surfaces: `python -m benchmarks.autotune.replay FILE...`.

A file is one that `python -m benchmarks.autotune --json FILE` wrote. A step of a setting takes its recorded median,
times a deviation drawn from those seen in the comparisons side by side, bursts of retransmission included. So runs
are alike but for their luck, and cost nothing. With `--tpe` the tree-structured Parzen estimator of optuna takes part,
by its ask-and-tell interface, if it is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bagua.autotune import Autotune, Outcome, Settings, Space, Tuner, strategies
from bagua.autotune.strategies import STRATEGIES, Trial
from bagua.autotune.trials import Trials
from bagua.bench import models, results_file
from bagua.bench.layout import Columns
from bagua.engine.reducer.bucketing import Entry
from bagua.engine.tuning.search_space import Effects

NEAR = 0.05
_FLOAT = 4  # bytes


def effects_of(model: str) -> Effects:
    """Of four ranks on as many hosts."""
    shapes = [shape for layer in reversed(models.get(model).layers) for shape in layer.shapes]
    entries = [Entry(str(index), _FLOAT * math.prod(shape), "float32") for index, shape in enumerate(shapes)]
    return Effects(entries, {entry.name: _FLOAT for entry in entries}, direct=True)


class Surface:
    """What was recorded under one condition."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.name: str = result["condition"]
        axes = {name: tuple(values) for name, values in result["axes"].items()}
        points = [(Settings.from_json(each["settings"]), each["steps_ms"]) for each in result["surface"]]
        self.space = Space(points[0][0], axes, effects_of(result["job"]["model"]))
        self._medians = {self.space.effect(settings): statistics.median(steps) for settings, steps in points}
        missing = [each for each in self.space.grid() if self.space.effect(each) not in self._medians]
        if missing:
            raise ValueError(f"{self.name}: {len(missing)} points of the space were not recorded")
        self.best = min(self._medians.values())
        self.deviations = [
            step / statistics.median(each["steps_ms"]) for each in result["compared"] for step in each["steps_ms"]
        ]

    def ms(self, settings: Settings) -> float:
        """The median step."""
        return self._medians[self.space.effect(settings)]

    def over_best(self, settings: Settings) -> float:
        """By how much it is slower than the best point, 0 for the best."""
        return self.ms(settings) / self.best - 1


def play(surface: Surface, search: str, deviations: Sequence[float], seed: int, max_turns: int) -> dict[str, Any]:
    """One run of the tuner: how near it came, and after how many steps it first was, and stayed, near."""
    dice = random.Random(seed)
    tuner = Tuner(Autotune(search=search, sampling_confidence_time_s=0, max_turns=max_turns), surface.space)
    order, steps, near_since = tuner.begin(), 0, None
    while order.num_steps:
        seconds = [surface.ms(order.settings) / 1000 * dice.choice(deviations) for _ in range(order.num_steps)]
        steps += order.num_steps
        order = tuner.next(Outcome([seconds]))
        near = surface.over_best(tuner.best) <= NEAR
        near_since = (near_since or steps) if near else None
    return {"over_best": surface.over_best(order.settings), "num_steps": steps, "near_since": near_since}


def tpe(space: Space, trials: Trials) -> Iterator[Trial]:
    """Optuna's, over the indices of the axes."""
    import optuna  # pyright: ignore[reportMissingImports]

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=_next_seed(), n_startup_trials=8))
    yield Trial(space.default)
    start = {name: values.index(getattr(space.default, name)) for name, values in space.axes.items()}
    study.enqueue_trial(start)
    for _ in range(200):
        asked = study.ask()
        place = {name: asked.suggest_int(name, 0, len(values) - 1) for name, values in space.axes.items()}
        settings = Settings(
            **{**space.default.as_json(), **{name: space.axes[name][index] for name, index in place.items()}}
        )
        if not trials.known(settings):
            yield Trial(settings)
        study.tell(asked, trials.score_s(settings))


_seeds = iter(range(10**9))


def _next_seed() -> int:
    return next(_seeds)


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of many runs. A run that never came near counts as infinitely many steps."""
    since = sorted(run["near_since"] if run["near_since"] is not None else math.inf for run in runs)
    ends = sorted(run["over_best"] for run in runs)
    return {
        "near_share": sum(end <= NEAR for end in ends) / len(ends),
        "median_over_best": statistics.median(ends),
        "p90_over_best": ends[int(0.9 * len(ends))],
        "median_steps_to_near": since[len(since) // 2],
        "mean_num_steps": statistics.fmean(run["num_steps"] for run in runs),
        "max_num_steps": max(run["num_steps"] for run in runs),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; with `--json` write it too."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autotune.replay", description="Compare searches.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by benchmarks.autotune --json")
    parser.add_argument("--runs", type=int, default=200, help="of each search on each surface; default 200")
    parser.add_argument("--max-turns", type=int, default=Autotune.max_turns, help="of a search (%(default)s)")
    parser.add_argument("--tpe", action="store_true", help="optuna takes part")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args(argv)
    if args.tpe:
        STRATEGIES["tpe"] = tpe
    surfaces = [Surface(result) for file in args.files for result in json.loads(file.read_text())["results"]]
    deviations = [each for surface in surfaces for each in surface.deviations]
    rows: list[dict[str, Any]] = []
    columns = Columns(
        ("condition", -14), ("search", -13), ("within 5%", 9), ("median", 9), ("p90", 7), ("steps to within 5%", 20),
        ("steps", 7), ("most", 7)
    )  # fmt: skip
    print(columns.head())
    for surface in surfaces:
        for search in STRATEGIES:
            if search == "exhaustive":
                continue  # with so few turns it is a walk through a corner
            runs = []
            for seed in range(args.runs):
                strategies._SEED = seed  # of those that roll dice
                runs.append(play(surface, search, deviations, seed, args.max_turns))
            row = {"condition": surface.name, "search": search, "points": len(surface.space.grid()), **summarise(runs)}
            rows.append(row)
            cells = [surface.name, search, f"{row['near_share']:.0%}", f"{row['median_over_best']:.1%}"]
            cells += [f"{row['p90_over_best']:.1%}", str(row["median_steps_to_near"])]
            print(columns.row([*cells, f"{row['mean_num_steps']:.0f}", str(row["max_num_steps"])]), flush=True)
    if args.json is not None:
        for row in rows:
            if math.isinf(row["median_steps_to_near"]):
                row["median_steps_to_near"] = None
        results_file.write(args.json, {"runs": args.runs, "near": NEAR, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One rank: measures the whole space, lets the library tune, and compares. Started by `__main__`, never by hand.

    python -m benchmarks.autotune.worker FOLDER

The folder holds `job.json`; `result-RANK.json` is written there. Environment: RANK, WORLD_SIZE, BAGUA_BENCH_ADDRESS.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

import bagua
from bagua.autotune import Settings, Space
from bagua.bench import models, results_file
from bagua.bench.compute import Compute, EmulatedModel
from bagua.bench.training import Training, make_optimizer
from bagua.bench.worker import connect, run_rank
from bagua.engine.engine import Engine
from bagua.engine.hooks import attachments
from bagua.engine.tuning.search_space import space_of

_GIVE_UP = 200  # steps after which tuning must be over


class Bench:
    """A model in training, whose engine is told what to do."""

    def __init__(self, job: dict[str, Any], autotune: bagua.Autotune | bool = False) -> None:
        self.model = EmulatedModel(models.get(job["model"]), Compute(job["compute_ms"] / 1000), seed=dist.get_rank())
        self._optimizer = make_optimizer("sgd", self.model)
        bagua.distribute(self.model, self._optimizer, job["algorithm"], autotune=autotune)
        self._training = Training.of(self.model, self._optimizer)

    @property
    def engine(self) -> Engine:
        """Of the model."""
        return attachments[self.model].engine

    def steps_s(self, num_steps: int) -> list[float]:
        """Seconds of each of some steps."""
        return [self._training.step().step_s for _ in range(num_steps)]

    def close(self) -> None:
        """Collective."""
        bagua.detach(self.model)

    def measure(self, settings: Settings, num_steps: int) -> list[float]:
        """Change over, make a step to get used to it, and some that count."""
        dist.barrier()
        self.engine.binding.adopt_settings(settings)
        self.steps_s(1)
        return self.steps_s(num_steps)


def sweep(job: dict[str, Any]) -> dict[str, Any]:
    """Every point of the space that the library tunes over."""
    bench = Bench(job)
    bench.steps_s(2)
    space = space_of(bench.engine.binding)
    grid = Space(space.default, {**space.axes, **job["axes"]}, space.effect).grid()
    started = time.monotonic()
    rows = []
    for settings in grid[: job["most_points"]]:
        rows.append([settings.as_json(), bench.measure(settings, job["steps"])])
    bench.close()
    axes = {name: list(values) for name, values in space.axes.items()}
    return {"axes": axes, "points": rows, "seconds": time.monotonic() - started}


def tune(job: dict[str, Any], search: str) -> dict[str, Any]:
    """Let the library tune from its defaults; returns what it says of it."""
    options = bagua.Autotune(search=search, sampling_confidence_time_s=0, log=job["log"])
    bench = Bench(job, options)
    steps: list[float] = []
    while bagua.stats(bench.model).tuning.phase != "done" and len(steps) < _GIVE_UP:  # pyright: ignore
        steps += bench.steps_s(1)
    tuning = bagua.stats(bench.model).tuning
    assert tuning is not None
    bench.close()
    return {
        "search": search,
        "phase": tuning.phase,
        "num_steps": len(steps),
        "num_samples": tuning.num_samples,
        "steps_s": steps,
        "settings": tuning.settings.as_json(),
        "problems": list(tuning.problems),
    }


def compare(job: dict[str, Any], chosen: Sequence[Settings]) -> list[list[float]]:
    """The same settings again and again, side by side; seconds of steps of each.

    A round before those that count: connections of lanes that are new carry less at first.
    """
    bench = Bench(job)
    bench.steps_s(2)
    for settings in chosen:
        bench.measure(settings, job["steps"])
    found: list[list[float]] = [[] for _ in chosen]
    for number in range(job["rounds"]):
        order = range(len(chosen)) if number % 2 == 0 else reversed(range(len(chosen)))
        for place in order:
            found[place] += bench.measure(chosen[place], job["steps"])
    bench.close()
    return found


def best_of(points: list[list[Any]], count: int) -> list[Settings]:
    """The points that look best to all ranks together: a step is over when the slowest rank is."""
    mine = [steps for _, steps in points]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    medians = []
    for place, (settings, _) in enumerate(points):
        steps = sorted(max(each) for each in zip(*(ranks[place] for ranks in everyone), strict=True))
        medians.append((steps[len(steps) // 2], place, settings))
    return [Settings.from_json(settings) for _, _, settings in sorted(medians, key=lambda each: each[:2])[:count]]


def best_known(known: dict[str, Any], count: int) -> list[Settings]:
    """The points that were fastest in an earlier run: in its comparison if they took part, else in its sweep."""
    scores = {json.dumps(each["settings"]): each["steps_ms"] for each in [*known["surface"], *known["compared"]]}
    ranked = sorted(scores, key=lambda text: statistics.median(scores[text]))
    return [Settings.from_json(json.loads(text)) for text in ranked[:count]]


def run(folder: Path, rank: int, size: int) -> None:
    """All of it, for one network."""
    job = json.loads((folder / "job.json").read_text())
    connect(folder, rank, size, job["timeout_s"])
    known = job.get("known")
    surface = None if known else sweep(job)
    best = best_known(known, job["num_best"]) if surface is None else best_of(surface["points"], job["num_best"])
    tuned = [tune({**job, "log": str(folder / f"log-{n}.csv")}, job["search"]) for n in range(job["num_tuned"])]
    default = Settings.from_json(known["surface"][0]["settings"] if surface is None else surface["points"][0][0])
    chosen = [default, *best, *(Settings.from_json(each["settings"]) for each in tuned)]
    chosen = list(dict.fromkeys(chosen))
    compared = compare(job, chosen)
    results_file.write(
        folder / f"result-{rank}.json",
        {
            "surface": surface,
            "best": [each.as_json() for each in best],
            "tuned": tuned,
            "compared": [[one.as_json(), steps] for one, steps in zip(chosen, compared, strict=True)],
        },
        indent=None,
    )
    dist.barrier()


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), run)

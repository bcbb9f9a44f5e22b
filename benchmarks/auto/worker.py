"""One rank: lets the library choose, then measures what it chose beside every setting. Started by `__main__`.

    python -m benchmarks.auto.worker FOLDER

The folder holds `job.json`; `result-RANK.json` is written there. Environment: RANK, WORLD_SIZE, BAGUA_BENCH_ADDRESS.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import bagua
from bagua.auto.candidates import allowed
from bagua.bench import contenders, models, results_file
from bagua.bench.compute import Compute, EmulatedModel
from bagua.bench.training import Training, make_optimizer
from bagua.bench.worker import await_file, connect, run_rank
from benchmarks.auto.judging import DDP, barred, finalists, slowest

_GIVE_UP = 60  # steps
_WARM, _HEAT = 2, 3
_MOST_AFTER_CHANGE = 60


class Bench:
    """A model in training."""

    def __init__(self, job: dict[str, Any], name: str) -> None:
        self.model = EmulatedModel(models.get(job["model"]), Compute(job["compute_ms"] / 1000), seed=dist.get_rank())
        if name == "auto":
            optimizer = make_optimizer("sgd", self.model)
            bagua.distribute(self.model, optimizer, "auto", allow=job["allow"])
            self._training = Training.of(self.model, optimizer, self._detach)
        else:
            self._training = contenders.get(name).prepare(self.model, emulated=True)

    def steps_ms(self, num_steps: int) -> list[float]:
        """Milliseconds of each of some steps."""
        return [1000 * self._training.step().step_s for _ in range(num_steps)]

    def observed(self) -> dict[str, Any]:
        """Make a step; returns what auto is doing after it, what runs, and how long exchanges took."""
        (step_ms,) = self.steps_ms(1)
        now = bagua.explain(self.model)
        comm_ms = 1000 * bagua.stats(self.model).last.comm_s
        return {"phase": now.phase, "chosen": now.chosen, "step_ms": round(step_ms, 3), "comm_ms": round(comm_ms, 3)}

    def close(self) -> None:
        """Collective."""
        self._training.close()

    def _detach(self) -> None:
        bagua.detach(self.model)


def choose(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Let the library choose; with a change of the link, wait for its second choice."""
    bench = Bench(job, "auto")
    made = 0
    while bagua.explain(bench.model).phase != "settled" and made < _GIVE_UP:
        bench.steps_ms(1)
        made += 1
    first = bagua.explain(bench.model)
    found: dict[str, Any] = {"steps_to_choose": made, "steps_ms": bench.steps_ms(job["steps"])}
    if job["change"]:
        found["before_change"] = [bench.observed() for _ in range(job["between"])]
        dist.barrier()
        if dist.get_rank() == 0:
            results_file.write(folder / "settled.json", 0, indent=None)
        await_file(folder / "changed.json", job["timeout_s"])
        dist.barrier()
        after: list[dict[str, Any]] = []
        while len(after) < _MOST_AFTER_CHANGE:
            after.append(bench.observed())
            now = bagua.explain(bench.model)
            if now.phase == "settled" and now.step != first.step:
                found["steps_to_choose_again"] = len(after)
                break
        found["after_change"] = after
        found["again"] = bagua.explain(bench.model).as_dict()
    bench.close()
    return {**found, "explanation": first.as_dict()}


def compare(job: dict[str, Any], explanation: dict[str, Any]) -> dict[str, Any]:
    """Settings of the class that learn well enough, and DDP: a heat of all, then rounds among those that matter."""
    nodes = tuple((rank,) for rank in range(dist.get_world_size()))
    periods = {each.name: each.period for each in allowed(job["allow"], nodes)} | {DDP: 1}
    for name in barred(explanation):
        periods.pop(name, None)
    heat: dict[str, list[float]] = {}
    for name, period in periods.items():
        bench = Bench(job, name)
        bench.steps_ms(_WARM)
        heat[name] = bench.steps_ms(max(_HEAT, period))
        bench.close()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, heat)
    names = finalists(slowest(gathered), explanation["chosen"], job["allow"])
    benches = {name: Bench(job, name) for name in names}
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(job["rounds"]):
        for name in names if number % 2 == 0 else reversed(names):
            benches[name].steps_ms(_WARM)
            found[name] += benches[name].steps_ms(max(job["steps"], periods[name]))
    for bench in benches.values():
        bench.close()
    return {"heat": heat, "fixed": found}


def run(folder: Path, rank: int, size: int) -> None:
    """All of it, for one network."""
    job = json.loads((folder / "job.json").read_text())
    connect(folder, rank, size, job["timeout_s"])
    chosen = choose(job, folder)
    result = {"auto": chosen, **compare(job, chosen.get("again", chosen["explanation"]))}
    results_file.write(folder / f"result-{rank}.json", result, indent=None)
    dist.barrier()


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), run)

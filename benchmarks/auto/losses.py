"""What a training under "auto" learns, beside DistributedDataParallel with as many steps: `--losses` of the package.

The two small tasks of `benchmarks.convergence` train on the hosts of an emulated cluster, under each condition and with
each seed. What DDP and a fixed setting learn does not depend on the link, so they are run once, on this machine: DDP,
and the settings that were chosen in an earlier run of the package. These runs are no timings.

As a program this is one rank: `python -m benchmarks.auto.losses FOLDER`, started by `run`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua
from bagua.algorithms.auto import Auto
from bagua.auto.candidates import CANDIDATES
from bagua.auto.loss_gaps import POINTS_PER_LOSS
from bagua.bench import machine, results_file
from bagua.bench.conditions import Condition
from bagua.bench.hosts import Hosts, LabHosts, LocalHosts, rank_environment
from bagua.bench.worker import connect, run_rank
from bagua.lab import LabError
from benchmarks.autotune.__main__ import await_ranks
from benchmarks.convergence.configurations import make_optimizer
from benchmarks.convergence.tasks import BUCKET_BYTES, RANKS, TASKS, Task, make_task
from benchmarks.convergence.training import Schedule, flat

__all__ = ["AUTO", "chosen_before", "gap_between", "measure", "rows_of", "text_of"]

AUTO, DDP = "auto", "ddp"
_TIMEOUT_S = 120.0


def measure(
    conditions: Sequence[Condition],
    settings: Mapping[str, str],
    job: Mapping[str, Any],
    file: Path | None,
    local: bool = False,
) -> int:
    """Train under each condition, print a line for each task, and add what is new to the JSON file.

    Args:
        conditions: networks.
        settings: those that were chosen in an earlier run, by the name of the condition.
        job: what all trainings have in common: `seeds`, `family` of the optimizer, `allow`, `limit_s` of a condition,
            `quick`.
        file: of results; what is there already is not trained again.
        local: processes of this machine instead of a cluster.

    Returns:
        0; 1 where something could not be measured.
    """
    content: dict[str, Any] = {"kind": "losses of auto", "job": dict(job), "ranks": RANKS, "fixed": {}, "results": []}
    if file is not None and file.exists():
        before = json.loads(file.read_text())
        if {**before["job"], "limit_s": 0} != {**content["job"], "limit_s": 0}:
            print(f"{file}: was measured with other options: {before['job']}", file=sys.stderr)
            return 1
        content = before
    code = 0
    wanted = [name for name in dict.fromkeys([DDP, *settings.values()]) if name not in content["fixed"]]
    try:
        for number, name in enumerate(wanted, 1):
            print(f"{name} without a network ({number} of {len(wanted)})", file=sys.stderr, flush=True)
            content["fixed"][name] = run(LocalHosts(RANKS), name, job)
            _write(file, content)
        for number, condition in enumerate(conditions, 1):
            if condition.name not in {each["condition"] for each in content["results"]}:
                print(f"{condition.name} ({number} of {len(conditions)})", file=sys.stderr, flush=True)
                begun = time.monotonic()
                try:
                    runs = run(LocalHosts(RANKS) if local else LabHosts(RANKS, condition), AUTO, job)
                except (RuntimeError, LabError, OSError) as error:
                    print(f"{condition.name}: {error}", file=sys.stderr)
                    code = 1
                    continue
                result = {"condition": condition.name, "date": machine.now(), "machine": machine.describe_machine()}
                content["results"].append(result | {"seconds": round(time.monotonic() - begun, 1), "runs": runs})
            content["rows"] = [
                row
                for each in content["results"]
                for row in rows_of(each, content["fixed"], settings.get(each["condition"]), job["allow"])
            ]
            for row in content["rows"]:
                if row["condition"] == condition.name:
                    print(text_of(row), flush=True)
            _write(file, content)
    except RuntimeError as error:
        print(f"without a network: {error}", file=sys.stderr)
        return 1
    return code


def _write(file: Path | None, content: dict[str, Any]) -> None:
    if file is not None:
        results_file.write(file, content, indent=None)


def run(hosts: Hosts, setting: str, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train all tasks with all seeds and `setting` on `hosts`, which are closed then.

    Raises:
        RuntimeError: a rank failed, or they took too long.
    """
    with tempfile.TemporaryDirectory(prefix="bagua-losses-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({**job, "setting": setting}))
        try:
            with (folder / "log.txt").open("w") as log:
                argv = [sys.executable, "-m", "benchmarks.auto.losses", name]
                processes = hosts.start(argv, rank_environment(hosts, RANKS), log)
                await_ranks(processes, folder, job["limit_s"])
            return json.loads((folder / "result.json").read_text())
        finally:
            hosts.close()


def chosen_before(file: Path) -> dict[str, str]:
    """What each condition's choice was, from a file of the package.

    Raises:
        ValueError: it is none; names the argument.
    """
    try:
        return {each["condition"]: each["summary"]["chosen"] for each in json.loads(file.read_text())["results"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--chosen: {file} has no choices: {type(error).__name__}: {error}") from error


# -- what came of it -------------------------------------------------------------------------------------------------


def rows_of(
    result: Mapping[str, Any], fixed: Mapping[str, Sequence[Mapping[str, Any]]], setting: str | None, allow: str
) -> list[dict[str, Any]]:
    """One row for each task: auto beside DDP, means over the seeds that both have; and the setting chosen before."""
    rows: list[dict[str, Any]] = []
    limit = Auto(allow=allow).limit(allow)
    for task in dict.fromkeys(each["task"] for each in result["runs"]):
        mine = [each for each in result["runs"] if each["task"] == task]
        base = [each for each in fixed[DDP] if each["task"] == task]
        gap = gap_between(mine, base)
        row: dict[str, Any] = {
            "condition": result["condition"],
            "task": task,
            "chosen": sorted({each["chosen"] for each in mine}),
            "loss": _mean(mine, "loss"),
            "accuracy": _mean(mine, "accuracy"),
            "ddp_loss": _mean(base, "loss"),
            "ddp_accuracy": _mean(base, "accuracy"),
            "gap": gap,
            "limit": limit,
            "within": gap <= limit,
        }
        if setting is not None:
            other = gap_between([each for each in fixed[setting] if each["task"] == task], base)
            row |= {"setting": setting, "setting_gap": other, "setting_within": other <= limit}
        rows.append(row)
    return rows


def gap_between(runs: Iterable[Mapping[str, Any]], base: Iterable[Mapping[str, Any]]) -> float:
    """How much worse `runs` are than those of `base` with the same seeds, as a fraction of the loss; below 0 if better.

    As in `bagua.auto.loss_gaps`: loss counts on text, and accuracy on digits, where a point is 4 %.

    Examples:
        >>> from benchmarks.auto.losses import gap_between
        >>> run = {"task": "char_lm", "seed": 0, "accuracy": 0.5}
        >>> round(gap_between([run | {"loss": 2.02}], [run | {"loss": 2.0}]), 4)
        0.01
    """
    pairs = [(one, two) for one in runs for two in base if one["seed"] == two["seed"]]
    if not pairs:
        raise ValueError("base: has no run with a seed of the others")
    one, two = ([pair[side] for pair in pairs] for side in (0, 1))
    if one[0]["task"] == "digits":
        points = 100 * (_mean(two, "accuracy") - _mean(one, "accuracy"))
        return points / POINTS_PER_LOSS
    return _mean(one, "loss") / _mean(two, "loss") - 1


def _mean(runs: Iterable[Mapping[str, Any]], name: str) -> float:
    return statistics.fmean(each[name] for each in runs)


def text_of(row: Mapping[str, Any]) -> str:
    """For people."""
    values = f"loss {row['loss']:.4f} (DDP {row['ddp_loss']:.4f}), "
    values += f"accuracy {100 * row['accuracy']:.2f} % (DDP {100 * row['ddp_accuracy']:.2f} %)"
    found = f"{row['condition']}, {row['task']}: {' or '.join(row['chosen'])}, {values}: gap {100 * row['gap']:+.2f} %"
    found += f" of {100 * row['limit']:.1f} %{'' if row['within'] else ' -- missed'}"
    if "setting" in row:
        found += f"; {row['setting']} {100 * row['setting_gap']:+.2f} %{'' if row['setting_within'] else ' -- missed'}"
    return found


# -- one rank --------------------------------------------------------------------------------------------------------


def train(setting: str, task: Task, seed: int, job: Mapping[str, Any]) -> dict[str, Any]:
    """Train to the end of the task; collective. Evaluates the mean of all ranks' weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    module = task.model()
    optimizer = make_optimizer(job["family"], module.parameters(), task.rates[job["family"]], task.steps)
    schedule = Schedule([optimizer], task.steps, task.warm)
    trained: nn.Module = module
    if setting == DDP:
        trained = DistributedDataParallel(module, bucket_cap_mb=BUCKET_BYTES / 2**20)
    elif setting == AUTO:
        bagua.distribute(module, optimizer, AUTO, allow=job["allow"], bucket_bytes=BUCKET_BYTES)
    else:
        candidate = next(each for each in CANDIDATES if each.name == setting)
        nodes = tuple((each,) for each in range(size))
        bagua.distribute(module, optimizer, candidate.make(nodes, [optimizer]), bucket_bytes=BUCKET_BYTES)
    for step in range(task.steps):
        schedule.set(step)
        optimizer.zero_grad()
        task.loss(trained, rank, step).backward()
        optimizer.step()
    found: dict[str, Any] = {"task": task.name, "setting": setting, "seed": seed, "steps": task.steps}
    found["chosen"] = setting
    if setting == AUTO:
        explanation = bagua.explain(module)
        if explanation.phase != "settled" and not job["quick"]:
            raise RuntimeError(f"{task.name}: nothing was chosen in {task.steps} steps: {explanation.reason}")
        notices = [each for each in bagua.stats(module).notices if each.startswith("auto: ")]
        found |= {"chosen": explanation.chosen, "step": explanation.step, "notices": notices}
    if setting != DDP:
        bagua.detach(module)
    weights = flat(module)
    dist.all_reduce(weights)
    with torch.no_grad():
        nn.utils.vector_to_parameters(weights / size, module.parameters())
    values = task.evaluate(module)
    return found | {"loss": values.loss, "accuracy": values.accuracy}


def work(folder: Path, rank: int, size: int) -> None:
    """All trainings of one job."""
    job = json.loads((folder / "job.json").read_text())
    connect(folder, rank, size, _TIMEOUT_S)
    found = [
        train(job["setting"], make_task(name, seed, job["quick"]), seed, job) for name in TASKS for seed in job["seeds"]
    ]
    dist.barrier()
    if rank == 0:
        results_file.write(folder / "result.json", found, indent=None)


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), work)

"""Algorithms that communicate every few dozen steps, with AdamW, Muon and SGD as the inner optimizer.

    python -m benchmarks.convergence.periodic [--json FILE] [--task NAME] [--seeds 31,32] [--steps N] [--only NAMES]
        [--optimizers NAMES] [--workers N]

The transformers, texts, schedules and learning rates of `one_bit`, on 4 simulated ranks. With "muon", matrices of the
blocks are trained by `torch.optim.Muon` and everything else by AdamW. Nothing but the algorithm differs between the
rows of an optimizer. The figure is the validation loss of the averaged weights after the last step. A row is an
algorithm with its options, `name:option=value:...`; `@0.25` makes the first quarter of the steps with
gradient_allreduce.
"""

from __future__ import annotations

import argparse
import ast
import copy
import datetime
import json
import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bagua
from bagua.algorithms import Algorithm, Warmup
from benchmarks.char_lm import draw_windows, even_windows
from benchmarks.convergence.one_bit import BATCH, RANKS, TASKS, WARM, ByteGPT, Task, load_source
from benchmarks.overhead import describe_machine

MUON_RATE = 0.02
PLAIN = "outer_momentum=0.0:nesterov=False:outer_lr=1.0"
ROWS = (
    "gradient_allreduce",
    "local_sgd",
    *(f"diloco:communication_interval={each}:outer_momentum=0.9:outer_lr=0.7" for each in (16, 32, 64)),
    *(f"diloco:communication_interval={each}:{PLAIN}" for each in (16, 32, 64)),
    *(f"sparse_loco:communication_interval={each}:keep=0.0" for each in (16, 32, 64)),
    *(f"sparse_loco:communication_interval={each}" for each in (16, 32, 64)),
)


class Run(NamedTuple):
    """What came of one run: loss of the averaged weights and of rank 0's, and what a rank has sent."""

    optimizer: str
    row: str
    seed: int
    loss: float
    loss_rank0: float
    mb: float
    seconds: float


def make_algorithm(row: str, steps: int) -> Algorithm:
    """Return the algorithm of a row for a run of `steps` steps.

    Raises:
        ValueError: the name or an option is unknown.

    Examples:
        >>> make_algorithm("diloco:communication_interval=16:outer_momentum=0.5@0.25", 100).steps
        25
    """
    text, _, warm = row.partition("@")
    name, *options = text.split(":")
    given: dict[str, Any] = {}
    for key, _, value in (each.partition("=") for each in options):
        try:
            given[key] = ast.literal_eval(value)
        except ValueError:
            given[key] = value
    algorithm = bagua.algorithms.get(name, **given)
    return Warmup(round(float(warm) * steps), "gradient_allreduce", algorithm) if warm else algorithm


def make_optimizers(kind: str, params: Sequence[nn.Parameter], task: Task) -> list[torch.optim.Optimizer]:
    """Return the inner optimizers. Muon takes the matrices of the blocks, not embeddings and output."""
    if kind == "sgd":
        return [torch.optim.SGD(params, lr=task.rates["sgd"], momentum=0.9)]
    if kind == "adamw":
        return [torch.optim.AdamW(params, lr=task.rates["adamw"])]
    matrices = [p for p in params if p.dim() == 2 and p.shape[0] != 256 and p.shape[0] != task.context]
    inner = {id(p) for p in matrices}
    rest = [p for p in params if id(p) not in inner]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=task.rates["adamw"]),
    ]


def train(job: tuple[str, str, str, int, int]) -> Run:
    """Train 4 ranks in this process."""
    name, kind, row, seed, steps = job
    task = TASKS[name]
    torch.set_num_threads(1)
    started, (text, held_out, _) = time.perf_counter(), load_source(task.text)
    generator = torch.Generator().manual_seed(seed)
    batches = [[draw_windows(text, BATCH, task.context, generator) for _ in range(RANKS)] for _ in range(steps)]
    optimizers: dict[int, list[tuple[dict[str, Any], float]]] = {}  # groups and their rates, by the first parameter

    def optimizer(params: Any) -> list[torch.optim.Optimizer]:
        made = make_optimizers(kind, list(params), task)
        optimizers[id(params[0])] = [(group, group["lr"]) for each in made for group in each.param_groups]
        return made

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        grown = min(1.0, (step + 1) / (WARM * steps))
        for group, rate in optimizers[id(next(module.parameters()))]:
            group["lr"] = rate * grown * 0.5 * (1 + math.cos(math.pi * step / steps))
        inputs, following = batches[step][rank]
        return F.cross_entropy(module(inputs).flatten(0, 1), following.flatten())

    result = bagua.simulate(
        make_algorithm(row, steps),
        ranks=RANKS,
        model=lambda: ByteGPT(task),
        loss=loss,
        steps=steps,
        optimizer=optimizer,
        seed=seed,
        bucket_bytes=task.bucket_bytes,
    )
    with torch.no_grad():
        mean = copy.deepcopy(result.models[0])
        for param, *others in zip(mean.parameters(), *(each.parameters() for each in result.models), strict=True):
            param.copy_(torch.stack(others).mean(0))
        inputs, following = even_windows(held_out, 512, task.context)
        final, first = (
            F.cross_entropy(each(inputs).flatten(0, 1), following.flatten()).item() for each in (mean, result.models[0])
        )
    mb = sum(stats.total.bytes_sent for stats in result.stats) / RANKS / 1e6
    return Run(kind, row, seed, final, first, mb, time.perf_counter() - started)


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Mean loss of each row over its seeds, and the percent above gradient_allreduce with the same optimizer."""
    rows = []
    for kind, name in dict.fromkeys((run.optimizer, run.row) for run in runs):
        exact = {run.seed: run.loss for run in runs if (run.optimizer, run.row) == (kind, "gradient_allreduce")}
        mine = [run for run in runs if (run.optimizer, run.row) == (kind, name)]
        behind = [100 * (run.loss / exact[run.seed] - 1) for run in mine if run.seed in exact]
        columns = ([r.loss for r in mine], [r.loss_rank0 for r in mine], [r.mb for r in mine])
        mean, first, mb = (sum(values) / len(mine) for values in columns)
        rows.append({"optimizer": kind, "row": name, "loss": mean, "loss_rank0": first, "mb": mb})
        rows[-1] |= {"seeds": [r.seed for r in mine]}
        rows[-1] |= {"percent_behind": sum(behind) / len(behind) if behind else None, "each": behind}
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    heads = ("optimizer", "algorithm", "loss", "% above gradient_allreduce", "of each seed", "rank 0", "MB sent")
    lines = [f"| {' | '.join(heads)} |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        behind = "" if row["percent_behind"] is None else f"{row['percent_behind']:+.1f}"
        each = ", ".join(f"{value:+.1f}" for value in row["each"])
        figures = f"{row['loss']:.3f} | {behind} | {each} | {row['loss_rank0']:.3f} | {row['mb']:.2f}"
        lines.append(f"| {row['optimizer']} | {row['row']} | {figures} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, maybe write the file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence.periodic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results there, after every run")
    parser.add_argument("--task", choices=list(TASKS), default="small", help="default: %(default)s")
    parser.add_argument("--seeds", default="31,32", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=320, help="default: %(default)s")
    parser.add_argument("--optimizers", default="adamw", help="of adamw, muon, sgd (default: %(default)s)")
    parser.add_argument("--only", default=",".join(ROWS), metavar="NAMES", help="rows: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    args = parser.parse_args(argv)
    kinds, names, seeds = args.optimizers.split(","), args.only.split(","), [int(s) for s in args.seeds.split(",")]
    for name in names:
        make_algorithm(name, args.steps)
    jobs = [(args.task, kind, name, seed, args.steps) for seed in seeds for kind in kinds for name in names]
    runs: list[Run] = []
    task = TASKS[args.task]
    header = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "task": args.task,
        "data": {"what": task.text, "digest": load_source(task.text)[2]},
        "steps": args.steps,
        "ranks": RANKS,
        "batch_per_rank": BATCH,
        "context": task.context,
        "parameters": sum(param.numel() for param in ByteGPT(task).parameters()),
        "rates": dict(task.rates) | {"muon": MUON_RATE},
    }
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        for run in pool.map(train, jobs):
            runs.append(run)
            print(f"[{len(runs)}/{len(jobs)}] {run}", flush=True)
            if args.json is not None:
                report = header | {"rows": summarise(runs), "runs": [each._asdict() for each in runs]}
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{table(summarise(runs))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Algorithms that communicate every few dozen steps, with AdamW, Muon, SGD and others as the inner optimizer.

    python -m benchmarks.convergence.periodic [--json FILE] [--task NAME] [--seeds 31,32] [--steps N] [--only NAMES]
        [--optimizers NAMES] [--ranks 4] [--workers N]

The tasks, schedules and learning rates of `byte_gpt`, on simulated ranks. With "muon", matrices of the
blocks are trained by `torch.optim.Muon` and everything else by AdamW. Nothing but the algorithm differs between the
rows of an optimizer, except that `qadam`, `zero_one_adam` and `demo` have their own in the place of AdamW, and that
`dion` has SGD in the place of Muon. `OTHER_OPTIMIZERS` of `byte_gpt` have rates of their own, for all tasks.
The figure is the validation loss of the averaged weights after the last step. A row is an algorithm with its options,
`name:option=value:...`, where `/` and `~` in a value stand for `:` and `=`; `@0.25` makes the first quarter of the
steps with gradient_allreduce. `delayed:delay=2:every=4` is `async` with rounds that take two steps and begin every four
steps: real rounds take as long as they take, and no run could be repeated.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch

import bagua
from bagua.algorithms import Algorithm, Warmup
from benchmarks.convergence.byte_gpt import (
    MATRIX_OPTIMIZERS,
    MUON_RATE,
    OWN_OPTIMIZERS,
    TASKS,
    Job,
    base_parser,
    held_out_loss,
    run_jobs,
    train_ranks,
)
from benchmarks.convergence.delayed import DelayedAverage

PLAIN = "outer_momentum=0.0:nesterov=False:outer_lr=1.0"
ROWS = (
    "gradient_allreduce",
    "local_sgd",
    *(f"diloco:communication_interval={each}:codec=identity:outer_momentum=0.9:outer_lr=0.7" for each in (16, 32, 64)),
    *(f"diloco:communication_interval={each}:codec=identity:{PLAIN}" for each in (16, 32, 64)),
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
    name, options, warm = parse_row(row)
    algorithm = DelayedAverage(**options) if name == DelayedAverage.name else bagua.algorithms.get(name, **options)
    return Warmup(round(warm * steps), "gradient_allreduce", algorithm) if warm else algorithm


def parse_row(row: str) -> tuple[str, dict[str, Any], float]:
    """Return the algorithm's name, its options, and the part of the steps that is made with gradient_allreduce before.

    Examples:
        >>> parse_row("bytegrad:codec=eden/bits~1")
        ('bytegrad', {'codec': 'eden:bits=1'}, 0.0)
    """
    text, _, warm = row.partition("@")
    name, *options = text.split(":")
    if name in ("demo", "dion"):
        import_module("bagua.contrib")
    given: dict[str, Any] = {}
    for key, _, value in (each.partition("=") for each in options):
        try:
            given[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):  # a word
            given[key] = value.replace("/", ":").replace("~", "=")
    return name, given, float(warm or 0)


def train(job: Job) -> Run:
    """Train the ranks in this process."""
    task = TASKS[job.task]
    algorithm = make_algorithm(job.row, job.steps)
    own = algorithm.name if algorithm.name in {*OWN_OPTIMIZERS, *MATRIX_OPTIMIZERS} else job.optimizer
    result, seconds = train_ranks(job._replace(optimizer=own), algorithm)
    mean = copy.deepcopy(result.models[0])
    with torch.no_grad():
        for param, *others in zip(mean.parameters(), *(each.parameters() for each in result.models), strict=True):
            param.copy_(torch.stack(others).mean(0))
    final, first = held_out_loss(task, mean), held_out_loss(task, result.models[0])
    return Run(job.optimizer, job.row, job.seed, final, first, result.bytes_sent / 1e6, seconds)


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
    parser = base_parser(
        "python -m benchmarks.convergence.periodic", __doc__, seeds="31,32", steps=320, optimizers="adamw", rows=ROWS
    )
    args = parser.parse_args(argv)
    kinds, names, seeds = args.optimizers.split(","), args.only.split(","), [int(s) for s in args.seeds.split(",")]
    for name in names:
        make_algorithm(name, args.steps)
    jobs = [
        Job(args.task, kind, name, seed, args.steps, args.ranks) for seed in seeds for kind in kinds for name in names
    ]
    rates = dict(TASKS[args.task].rates) | {"muon": MUON_RATE}
    print(f"\n{table(run_jobs(args, jobs, train, summarise, rates))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What one and two bits for each gradient element do to a small GPT, with and without error feedback.

    python -m benchmarks.convergence.one_bit [--json FILE] [--task NAME] [--seeds 21,22] [--steps N] [--only NAMES]
        [--optimizers NAMES] [--workers N]

The tasks of `byte_gpt`. AdamW and SGD with momentum each have their own learning rate; nothing else differs between the
rows of an optimizer. The figure is the validation loss after the last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import bagua
from bagua.codecs import Eden
from benchmarks.convergence.byte_gpt import TASKS, Job, base_parser, held_out_loss, run_jobs, train_ranks

# Algorithm and options by name; None where nothing is compressed.
ROWS: Mapping[str, Mapping[str, Any] | None] = {
    "gradient_allreduce": None,
    "eden 1 bit": {"codec": Eden(bits=1), "error_feedback": False, "running_scale": False},
    "eden 1 bit + scale": {"codec": Eden(bits=1), "error_feedback": False, "running_scale": True},
    "sign + feedback": {"codec": "sign", "error_feedback": True},
    "eden 1 bit + feedback": {"codec": Eden(bits=1), "error_feedback": True},
    "sign": {"codec": "sign", "error_feedback": False},
    "eden 2 bits": {"codec": Eden(bits=2), "error_feedback": False, "running_scale": False},
    "eden 2 bits + scale": {"codec": Eden(bits=2), "error_feedback": False, "running_scale": True},
    "eden 2 bits + feedback": {"codec": Eden(bits=2), "error_feedback": True},
}


class Run(NamedTuple):
    """What came of one run; `mb` is sent by a rank."""

    optimizer: str
    row: str
    seed: int
    loss: float
    mb: float
    seconds: float


def train(job: Job) -> Run:
    """Train the ranks in this process."""
    options = ROWS[job.row]
    if options is None:
        algorithm = bagua.algorithms.get("gradient_allreduce")
    else:  # as it was when docs/codec-measurements.md was measured
        algorithm = bagua.algorithms.get("bytegrad", **options, denoise_second_moment=False)
    result, seconds = train_ranks(job, algorithm)
    loss = held_out_loss(TASKS[job.task], result.models[0])
    return Run(job.optimizer, job.row, job.seed, loss, result.bytes_sent / 1e6, seconds)


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Mean loss of each row over its seeds, and the percent above gradient_allreduce on the same seeds."""
    rows = []
    for kind in ("adamw", "sgd"):
        exact = {run.seed: run.loss for run in runs if (run.optimizer, run.row) == (kind, "gradient_allreduce")}
        for name in ROWS:
            mine = [run for run in runs if (run.optimizer, run.row) == (kind, name) and run.seed in exact]
            if mine:
                behind = [100 * (run.loss / exact[run.seed] - 1) for run in mine]
                mean, mb = (sum(values) / len(mine) for values in ([r.loss for r in mine], [r.mb for r in mine]))
                row = {"optimizer": kind, "row": name, "loss": mean, "mb": mb, "seeds": [r.seed for r in mine]}
                rows.append(row | {"percent_behind": sum(behind) / len(behind), "each": behind})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = ["| optimizer | codec | validation loss | % above full precision | of each seed | MB sent a rank |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        each = ", ".join(f"{value:+.1f}" for value in row["each"])
        figures = f"{row['loss']:.3f} | {row['percent_behind']:+.1f} | {each} | {row['mb']:.1f}"
        lines.append(f"| {row['optimizer']} | {row['row']} | {figures} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, maybe write the file."""
    parser = base_parser(
        "python -m benchmarks.convergence.one_bit",
        __doc__,
        seeds="21,22",
        steps=300,
        optimizers="adamw,sgd",
        rows=list(ROWS),
    )
    args = parser.parse_args(argv)
    kinds, names, seeds = args.optimizers.split(","), args.only.split(","), map(int, args.seeds.split(","))
    jobs = [
        Job(args.task, kind, name, seed, args.steps, args.ranks)
        for seed in seeds
        for name in ROWS
        if name in names
        for kind in kinds
    ]
    print(f"\n{table(run_jobs(args, jobs, train, summarise, TASKS[args.task].rates))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The command line of the benchmark; see the package."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

import benchmarks.convergence
from bagua.bench import results_file
from bagua.bench.machine import describe_machine, now
from benchmarks.convergence.configurations import Configuration, all_configurations, select
from benchmarks.convergence.merge import combine, read, without_known_bases
from benchmarks.convergence.plots import plot
from benchmarks.convergence.pool import run_simulated
from benchmarks.convergence.processes import run_in_processes
from benchmarks.convergence.report import TARGETS, summarise, table, to_json
from benchmarks.convergence.tasks import BUCKET_BYTES, RANKS, TASKS, make_task
from benchmarks.convergence.training import Job, Outcome

SEEDS = 3


def _words(text: str) -> list[str]:
    """Names with a comma in them need ";" between names."""
    return [word.strip() for word in text.split(";" if ";" in text else ",") if word.strip()]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    names = ", ".join(each.name for each in all_configurations())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=benchmarks.convergence.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"configurations: {names}",
    )
    parser.add_argument("--quick", action="store_true", help="one seed and few steps: the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and curves there")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write a PNG and an SVG for each task there")
    parser.add_argument("--only", type=_words, metavar="NAMES", help="configurations, algorithms, families: a,b or a;b")
    parser.add_argument(
        "--merge",
        type=Path,
        metavar="FILE",
        help="take the runs of all other configurations from this earlier --json file; DDP too, unless it is named",
    )
    parser.add_argument("--tasks", type=_words, metavar="NAMES", default=list(TASKS), help=f"of {','.join(TASKS)}")
    parser.add_argument(
        "--limit",
        type=float,
        default=math.inf,
        metavar="MINUTES",
        help="stop after so long; seeds run one after another, so that all configurations have some",
    )
    parser.add_argument("--workers", type=int, default=2, help="processes for simulated runs (default: %(default)s)")
    return parser


def _with_runs(outcomes: Sequence[Outcome], tasks: Iterable[str]) -> list[Configuration]:
    """Configurations that have been run, in the table's order."""
    ran = {each.configuration for each in outcomes if each.task in tasks}
    return [each for each in all_configurations() if each.name in ran]


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, maybe write files; 1 if a run failed. Missed targets are results, not failures."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        chosen: list[Configuration] = select(args.only) if args.only else all_configurations()
        tasks = {name: make_task(name, 0, args.quick) for name in args.tasks}
        earlier = read(args.merge, args.quick) if args.merge is not None else []
    except ValueError as error:
        parser.error(str(error))
    chosen = without_known_bases(chosen, args.only or [], earlier, list(tasks))
    torch.set_num_threads(1)  # as the workers have
    machine, started = describe_machine(), time.perf_counter()
    seeds = range(1 if args.quick else SEEDS)
    jobs = {
        real: [
            Job(task, each, seed, partial(make_task, task, seed, args.quick))
            for seed in seeds
            for task in tasks
            for each in chosen
            if each.processes is real
        ]
        for real in (True, False)
    }
    print(f"{len(jobs[True])} runs in {RANKS} processes over gloo", flush=True)
    outcomes = run_in_processes(jobs[True])
    print(f"{len(jobs[False])} simulated runs", flush=True)
    seconds = 60 * args.limit - (time.perf_counter() - started)
    outcomes += run_simulated(jobs[False], args.workers, seconds)
    outcomes = combine(earlier, outcomes)
    again, chosen = [each.name for each in chosen], _with_runs(outcomes, tasks)
    rows = summarise(outcomes, chosen, {name: task.metric for name, task in tasks.items()})
    print(f"\n{table(rows)}\n")
    print("result: mean of all ranks' weights, mean over seeds +- half the range; against DDP: + is worse")
    failed = [each for each in outcomes if each.error]
    for each in failed:
        print(f"FAILED: {each.task}, {each.configuration}, seed {each.seed}: {each.error}", file=sys.stderr)
    if args.json is not None:
        header = {
            "date": now(),
            "machine": machine,
            "quick": args.quick,
            **({"merged_with": args.merge.parent.name, "run_again": again} if args.merge is not None else {}),
            "minutes": (time.perf_counter() - started) / 60,
            "ranks": RANKS,
            "seeds": len(seeds),
            "bucket_bytes": BUCKET_BYTES,
            "targets": {"synchronous": TARGETS[True], "others": TARGETS[False]},
            "tasks": {
                name: {
                    "metric": task.metric,
                    "steps": task.steps,
                    "parameters": sum(param.numel() for param in task.model().parameters()),
                    "learning_rates": task.rates,
                    **task.about,
                }
                for name, task in tasks.items()
            },
            "configurations": {each.name: {k: str(v) for k, v in asdict(each).items() if v} for each in chosen},
        }
        results_file.write_text(args.json, to_json(header, rows, outcomes))
    if args.plots is not None:
        for name in tasks:
            for path in plot(name, chosen, outcomes, args.plots):
                print(f"written: {path}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

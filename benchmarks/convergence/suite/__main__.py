"""The command line of the suite; see the package."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import benchmarks.convergence.suite
from bagua.bench import results_file
from bagua.bench.machine import describe_machine, now
from benchmarks.convergence.merge import outcome_of
from benchmarks.convergence.pool import run_simulated
from benchmarks.convergence.processes import run_in_processes
from benchmarks.convergence.report import TARGETS, to_json
from benchmarks.convergence.suite.noise import noise_of_runs
from benchmarks.convergence.suite.report import suite_table, summarise_suite, verdicts
from benchmarks.convergence.suite.rows import SuiteRow, all_rows, select_rows
from benchmarks.convergence.suite.tasks import JUDGING, STEPS, SUITE, families, make_suite_task
from benchmarks.convergence.suite.times import AGREEMENT, CLUSTER, COMPUTE_MS
from benchmarks.convergence.tasks import RANKS
from benchmarks.convergence.training import Job, Outcome

QUICK_STEPS = 64


def _words(text: str) -> list[str]:
    """Several names with a comma in them need ";" between them."""
    if text.strip() in {row.name for row in all_rows()}:
        return [text.strip()]
    return [word.strip() for word in text.split(";" if ";" in text else ",") if word.strip()]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence.suite",
        description=benchmarks.convergence.suite.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="rows: " + "; ".join(row.name for row in all_rows() if row.share == 1 and not row.order),
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write results and curves there, after every run")
    add("--resume", action="store_true", help="keep the runs that FILE has, and make those that it lacks")
    add("--minutes", type=float, default=math.inf, metavar="M", help="begin no run after so long")
    add("--quick", action="store_true", help=f"{QUICK_STEPS} steps, one seed for tuning: the figures mean nothing")
    add(
        "--only", type=_words, metavar="NAMES", help="rows, labels, algorithms, families, budgets, controls: a,b or a;b"
    )
    add("--tasks", type=_words, metavar="NAMES", default=list(SUITE), help=f"of {','.join(SUITE)}")
    add("--seeds", type=_words, metavar="NUMBERS", help=f"below {JUDGING} to tune, others to judge (100,101,102)")
    add("--rate", type=float, metavar="F", default=1.0, help="factor of all learning rates, for tuning only")
    add(
        "--step-ms",
        type=float,
        metavar="M",
        default=0.0,
        help="in processes a step takes at least so long: rounds of async should fit in a step, as of a real model",
    )
    add("--workers", type=int, default=2, help="processes for simulated runs (default: %(default)s)")
    return parser


def _seeds(words: Sequence[str] | None, quick: bool) -> list[int]:
    if words is None:
        return [1] if quick else [JUDGING, JUDGING + 1, JUDGING + 2]
    if not words or not all(word.isdigit() for word in words):
        raise ValueError(f"--seeds: expected numbers >= 0, got {','.join(words)!r}")
    seeds = [int(word) for word in words]
    if min(seeds) < JUDGING <= max(seeds):
        raise ValueError(f"--seeds: those below {JUDGING} are for tuning, others for judging; run them apart")
    return seeds


def jobs_of(
    rows: Sequence[SuiteRow], tasks: Sequence[str], seeds: Sequence[int], steps: int, rate: float = 1.0
) -> list[Job]:
    """Return all runs, in the order in which they are to be made."""
    wanted = [
        (row.rank, seed, task, row)
        for row in rows
        for seed in seeds
        for task in tasks
        if row.configuration.family in families(task)
    ]
    return [
        Job(
            task,
            row.configuration,
            seed,
            partial(make_suite_task, task, seed, max(1, round(steps * row.share)), rate, row.order),
        )
        for _, seed, task, row in sorted(wanted, key=lambda each: (*each[:2], tasks.index(each[2])))
    ]


def _settings(tasks: Sequence[str], steps: int, rate: float, step_ms: float) -> dict[str, Any]:
    """What all runs of a file have in common."""
    found: dict[str, Any] = {"steps": steps, "ranks": RANKS, "step_ms": step_ms, "tasks": {}}
    for name in tasks:
        task = make_suite_task(name, 0, 1, rate)
        parameters = sum(param.numel() for param in task.model().parameters())
        found["tasks"][name] = {"parameters": parameters, "learning_rates": dict(task.rates), "warm": task.warm}
    return found


def read_runs(path: Path, settings: dict[str, Any]) -> list[Outcome]:
    """Return the runs of a file that ended without an error.

    Raises:
        ValueError: they were made with other settings.
    """
    report = json.loads(path.read_text())
    found = {"step_ms": 0.0, **report["settings"]}
    for key in ("steps", "ranks", "step_ms"):
        if found[key] != settings[key]:
            raise ValueError(f"--resume: {path} has {key} {found[key]}, not {settings[key]}")
    for name in {each["task"] for each in report["runs"]}:
        if report["settings"]["tasks"][name] != settings["tasks"].get(name):
            raise ValueError(f"--resume: {path} has another task {name!r}: {report['settings']['tasks'][name]}")
    return [outcome_of(run) for run in report["runs"] if not run["error"]]


def run(jobs: Sequence[Job], workers: int, seconds: float, step_s: float = 0.0) -> Iterator[Outcome]:
    """Make the runs: simulated ones first, then those in processes, each seed for itself, with steps of `step_s`."""
    started = time.perf_counter()
    simulated = [job for job in jobs if not job.configuration.processes]
    real = [job for job in jobs if job.configuration.processes]
    if simulated:
        yield from run_simulated(simulated, workers, seconds)
    for seed in dict.fromkeys(job.seed for job in real):
        if time.perf_counter() - started > seconds:
            print("out of time, runs in processes are left out", flush=True)
            return
        yield from run_in_processes([job for job in real if job.seed == seed], step_s)


def _writer(path: Path | None, quick: bool, settings: dict[str, Any], rows: Sequence[SuiteRow]) -> Callable[..., None]:
    machine, started = describe_machine(), time.perf_counter()

    def write(outcomes: Sequence[Outcome], tasks: Sequence[str]) -> None:
        if path is None:
            return
        summaries = summarise_suite(outcomes, rows, tasks)
        header = {
            "date": now(),
            "machine": machine,
            "quick": quick,
            "minutes": (time.perf_counter() - started) / 60,
            "settings": settings,
            "targets": {"synchronous": TARGETS[True]["loss"], "others": TARGETS[False]["loss"]},
            "link": {**asdict(CLUSTER), "compute_ms": COMPUTE_MS, "bytes_agree_to": AGREEMENT},
            "verdicts": verdicts(summaries),
            "noise": {each.task: asdict(each) for each in noise_of_runs(outcomes, rows, tasks)},
        }
        results_file.write_text(path, to_json(header, summaries, outcomes))

    return write


def main(argv: list[str] | None = None) -> int:
    """Run, print the table, maybe write the file; 1 if a run failed. Missed targets are results, not failures."""
    parser = build_parser()
    args = parser.parse_args(argv)
    steps = QUICK_STEPS if args.quick else STEPS
    try:
        rows = select_rows(args.only) if args.only else all_rows()
        seeds = _seeds(args.seeds, args.quick)
        unknown = [name for name in args.tasks if name not in SUITE]
        if unknown:
            raise ValueError(f"--tasks: {unknown[0]!r} is unknown; available: {', '.join(SUITE)}")
        if args.resume and args.json is None:
            raise ValueError("--resume: needs --json FILE")
        if not 0 <= args.step_ms < math.inf:
            raise ValueError(f"--step-ms: expected milliseconds >= 0, got {args.step_ms:g}")
        if not 0 < args.rate < math.inf or (args.rate != 1 and max(seeds) >= JUDGING):
            raise ValueError(f"--rate: expected a factor > 0, and 1 with seeds for judging, got {args.rate:g}")
        settings = _settings(list(SUITE), steps, args.rate, args.step_ms)
        outcomes = read_runs(args.json, settings) if args.resume and args.json.exists() else []
    except ValueError as error:
        parser.error(str(error))
    if args.quick and not args.only:
        rows = [row for row in rows if not row.configuration.processes]
    torch.set_num_threads(1)  # as the workers have
    have = {(each.task, each.configuration, each.seed) for each in outcomes}
    jobs = [
        job
        for job in jobs_of(rows, args.tasks, seeds, steps, args.rate)
        if (job.task, job.configuration.name, job.seed) not in have
    ]
    print(f"{len(jobs)} runs, {len(have)} are there", flush=True)
    write = _writer(args.json, args.quick, settings, all_rows())
    for outcome in run(jobs, args.workers, 60 * args.minutes, args.step_ms / 1000):
        outcomes.append(outcome)
        write(outcomes, list(SUITE))
    write(outcomes, list(SUITE))  # without a run too: what is made of the runs may have changed
    print(f"\n{suite_table(summarise_suite(outcomes, all_rows(), list(SUITE)))}")
    failed = [each for each in outcomes if each.error]
    for each in failed:
        print(f"FAILED: {each.task}, {each.configuration}, seed {each.seed}: {each.error}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Simulated runs, several at a time. In a module of its own, for the workers to import."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.convergence.configurations import by_name
from benchmarks.convergence.processes import Job
from benchmarks.convergence.tasks import make_task
from benchmarks.convergence.training import Outcome, simulate

__all__ = ["run_simulated"]


def _simulated(job: tuple[Job, bool]) -> Outcome:
    """In a worker: one run. A configuration that fails must not take the others with it."""
    (task, name, seed), quick = job
    torch.set_num_threads(1)
    try:
        return simulate(by_name(name), make_task(task, seed, quick), seed)
    except Exception as error:
        nan = math.nan
        reason = f"{type(error).__name__}: {error}"
        return Outcome(task, name, seed, nan, nan, nan, nan, nan, nan, nan, (), (), (), reason)


def run_simulated(jobs: Sequence[Job], quick: bool, workers: int, seconds: float) -> list[Outcome]:
    """Run the jobs in `workers` processes, and say how far it is. After `seconds` no more are awaited."""
    outcomes: list[Outcome] = []
    started = time.perf_counter()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for number, outcome in enumerate(pool.map(_simulated, [(job, quick) for job in jobs]), 1):
            outcomes.append(outcome)
            left = (time.perf_counter() - started) / number * (len(jobs) - number)
            result = outcome.error or f"accuracy {outcome.accuracy:.2%}, loss {outcome.loss:.4f}"
            what = f"{outcome.task}, {outcome.configuration}, seed {outcome.seed}: {result}, {outcome.seconds:.1f} s"
            print(f"[{number}/{len(jobs)}, {left / 60:.1f} min left] {what}", flush=True)
            if time.perf_counter() - started > seconds and number < len(jobs):
                print(f"out of time, {len(jobs) - number} runs are left out", flush=True)
                pool.shutdown(wait=True, cancel_futures=True)
                break
    return outcomes

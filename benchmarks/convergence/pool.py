"""Simulated runs, several at a time. In a module of its own, for the workers to import."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.convergence.training import Job, Outcome, simulate

__all__ = ["run_simulated"]


def _simulated(job: Job) -> Outcome:
    """In a worker: one run. A configuration that fails must not take the others with it."""
    torch.set_num_threads(1)
    try:
        return simulate(job.configuration, job.make_task(), job.seed)
    except Exception as error:
        nan = math.nan
        reason = f"{type(error).__name__}: {error}"
        return Outcome(
            job.task, job.configuration.name, job.seed, nan, nan, nan, nan, nan, nan, nan, (), (), (), reason
        )


def run_simulated(jobs: Sequence[Job], workers: int, seconds: float) -> Iterator[Outcome]:
    """Run the jobs in `workers` processes, and say how far it is. After `seconds` no more are awaited."""
    started = time.perf_counter()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        try:
            for number, outcome in enumerate(pool.map(_simulated, jobs), 1):
                left = (time.perf_counter() - started) / number * (len(jobs) - number)
                result = outcome.error or f"accuracy {outcome.accuracy:.2%}, loss {outcome.loss:.4f}"
                what = (
                    f"{outcome.task}, {outcome.configuration}, seed {outcome.seed}: {result}, {outcome.seconds:.1f} s"
                )
                print(f"[{number}/{len(jobs)}, {left / 60:.1f} min left] {what}", flush=True)
                yield outcome
                if time.perf_counter() - started > seconds and number < len(jobs):
                    print(f"out of time, {len(jobs) - number} runs are left out", flush=True)
                    break
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

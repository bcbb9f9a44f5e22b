"""Simulated runs, several at a time. In a module of its own, for the workers to import."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

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
    """Run the jobs in `workers` processes, and say how far it is; yields outcomes as they come.

    After `seconds` no more are begun, but for the first; those that run are awaited.
    """
    started, made = time.perf_counter(), 0
    waiting, running = deque(jobs), set[Future[Outcome]]()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        while waiting or running:
            in_time = time.perf_counter() - started <= seconds or not (made or running)
            while waiting and in_time and len(running) < workers:
                running.add(pool.submit(_simulated, waiting.popleft()))
            if not running:
                print(f"out of time, {len(waiting)} runs are left out", flush=True)
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                outcome, made = future.result(), made + 1
                left = (time.perf_counter() - started) / made * (len(jobs) - made)
                result = outcome.error or f"accuracy {outcome.accuracy:.2%}, loss {outcome.loss:.4f}"
                what = f"{outcome.task}, {outcome.configuration}, seed {outcome.seed}: {result}"
                place = f"{made}/{len(jobs)}, {left / 60:.1f} min left"
                print(f"[{place}] {what}, {outcome.seconds:.1f} s", flush=True)
                yield outcome

"""Runs in real processes over gloo: torch's DistributedDataParallel, and what the simulator cannot run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bagua
from bagua.bench.spawned import run_ranks
from benchmarks.convergence.configurations import Configuration
from benchmarks.convergence.tasks import BUCKET_BYTES, RANKS, Task
from benchmarks.convergence.training import Job, Outcome, Recorder, Schedule

__all__ = ["run_in_processes"]


def run_in_processes(jobs: Sequence[Job], step_s: float = 0.0) -> list[Outcome]:
    """Run all jobs, one after another, in one set of processes.

    Args:
        jobs: what to run.
        step_s: seconds that the passes of a step take at least.
    """
    if not jobs:
        return []
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "outcomes.json"
        run_ranks(_rank_main, RANKS, jobs, answer, step_s)
        outcomes = [Outcome(**each) for each in json.loads(answer.read_text())]
    return outcomes


def _rank_main(rank: int, jobs: Sequence[Job], answer: Path, step_s: float) -> None:
    outcomes: list[Outcome] = []
    for job in jobs:
        outcome = _train(job.configuration, job.make_task(), job.seed, rank, step_s)
        if outcome is not None:
            outcomes.append(outcome)
            print(f"  {job.task}, {job.configuration.name}, seed {job.seed}: {outcome.seconds:.1f} s", flush=True)
    if rank == 0:
        answer.write_text(json.dumps([asdict(each) for each in outcomes]))


def _train(configuration: Configuration, task: Task, seed: int, rank: int, step_s: float) -> Outcome | None:
    """Train one job; rank 0 returns what came of it."""
    dist.barrier()
    started = time.perf_counter()
    recorder = Recorder(task)
    torch.manual_seed(seed)
    module = task.model()
    optimizers = task.optimizers(configuration, list(module.parameters()))
    schedule = Schedule(optimizers, task.steps, task.warm)
    trained: nn.Module = module
    if configuration.algorithm:
        bagua.distribute(module, optimizers, configuration.make(task.steps), bucket_bytes=task.bucket_bytes)
    else:
        trained = DistributedDataParallel(module, bucket_cap_mb=(task.bucket_bytes or BUCKET_BYTES) / 2**20)
    dense = 2 * (RANKS - 1) / RANKS * sum(param.numel() * param.element_size() for param in module.parameters())

    def bytes_sent(step: int) -> float:
        return bagua.stats(module).total.bytes_sent if configuration.algorithm else step * dense

    for step in range(task.steps):
        schedule.set(step)
        recorder.look(step, module, bytes_sent(step))
        for each in optimizers:
            each.zero_grad()
        begun = time.perf_counter()
        task.loss(trained, rank, step).backward()
        time.sleep(max(0.0, step_s - (time.perf_counter() - begun)))
        for each in optimizers:
            each.step()
    recorder.keep(module, bytes_sent(task.steps))
    if configuration.algorithm:
        bagua.detach(module)
    mine = torch.stack(recorder.weights)
    everyone = [torch.empty_like(mine) for _ in range(RANKS)] if rank == 0 else None
    dist.gather(mine, everyone)
    if everyone is None:
        return None
    weights = list(torch.stack(everyone, 1))
    seconds = time.perf_counter() - started
    return recorder.outcome(module, weights, recorder.mb, configuration.name, seed, seconds)

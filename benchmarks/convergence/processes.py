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
from benchmarks.convergence.configurations import Configuration, by_name, make_optimizer
from benchmarks.convergence.tasks import RANKS, Task, make_task
from benchmarks.convergence.training import BUCKET_BYTES, Outcome, Recorder, set_rate

__all__ = ["Job", "run_in_processes"]

Job = tuple[str, str, int]  # task, configuration, seed


def run_in_processes(jobs: Sequence[Job], quick: bool) -> list[Outcome]:
    """Run all jobs, one after another, in one set of processes."""
    if not jobs:
        return []
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "outcomes.json"
        run_ranks(_rank_main, RANKS, jobs, quick, answer)
        outcomes = [Outcome(**each) for each in json.loads(answer.read_text())]
    return outcomes


def _rank_main(rank: int, jobs: Sequence[Job], quick: bool, answer: Path) -> None:
    outcomes: list[Outcome] = []
    for task_name, name, seed in jobs:
        outcome = _train(by_name(name), make_task(task_name, seed, quick), seed, rank)
        if outcome is not None:
            outcomes.append(outcome)
            print(f"  {task_name}, {name}, seed {seed}: {outcome.seconds:.1f} s", flush=True)
    if rank == 0:
        answer.write_text(json.dumps([asdict(each) for each in outcomes]))


def _train(configuration: Configuration, task: Task, seed: int, rank: int) -> Outcome | None:
    """Train one job; rank 0 returns what came of it."""
    dist.barrier()
    started = time.perf_counter()
    recorder = Recorder(task)
    torch.manual_seed(seed)
    module = task.model()
    optimizer = make_optimizer(configuration.optimizer or configuration.family, module.parameters(), 0.1, task.steps)
    trained: nn.Module = module
    if configuration.algorithm:
        bagua.distribute(module, optimizer, configuration.make(task.steps), bucket_bytes=BUCKET_BYTES)
    else:
        trained = DistributedDataParallel(module, bucket_cap_mb=BUCKET_BYTES / 2**20)
    dense = 2 * (RANKS - 1) / RANKS * sum(param.numel() * param.element_size() for param in module.parameters())

    def bytes_sent(step: int) -> float:
        return bagua.stats(module).total.bytes_sent if configuration.algorithm else step * dense

    for step in range(task.steps):
        set_rate(optimizer, task, configuration.family, step)
        recorder.look(step, module, bytes_sent(step))
        optimizer.zero_grad()
        task.loss(trained, rank, step).backward()
        optimizer.step()
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

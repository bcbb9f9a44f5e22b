"""A rank of a system that restarts all ranks when one is lost: `torchrun` with DDP, and Bagua's elastic mode.

DDP saves weights and optimizer state to the disk that all hosts share; elastic mode keeps its commits in memory.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import bagua
from benchmarks.faults.journal import Journal
from benchmarks.faults.task import Task, parse, state_bytes

_TIMEOUT = timedelta(seconds=30)


class Checkpoint:
    """Weights, optimizer state and step in a file that is replaced in one move."""

    def __init__(self, folder: Path, task: Task) -> None:
        self._path, self._task, self.steps = folder / "checkpoint.pt", task, 0

    def restore(self) -> None:
        """Take over what was saved last, if anything was."""
        if self._path.exists():
            saved = torch.load(self._path, weights_only=True)
            self._task.model.load_state_dict(saved["model"])
            self._task.optimizer.load_state_dict(saved["optimizer"])
            self.steps = saved["steps"]

    def commit(self) -> None:
        """Save, on the first rank."""
        if dist.get_rank() == 0:
            part = self._path.with_suffix(f".{os.getpid()}")
            state = {"model": self._task.model.state_dict(), "optimizer": self._task.optimizer.state_dict()}
            torch.save({**state, "steps": self.steps}, part)
            part.replace(self._path)


def main() -> None:
    """Train until the file `stop` says that it is enough."""
    args = parse()
    journal = Journal(args.folder)
    task = Task(args)
    journal.ready()
    if os.environ["BAGUA_FAULTS_SYSTEM"] == "torchelastic":
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        state: Any = Checkpoint(args.folder, task)
        state.restore()
        module: torch.nn.Module = DistributedDataParallel(task.model)
        train(args, journal, task, module, state)
        dist.destroy_process_group()
        return
    bagua.init_process_group(timeout=_TIMEOUT)
    bagua.distribute(task.model, task.optimizer, task.configuration.make(10_000))
    with bagua.elastic.State(task.model, task.optimizer, steps=0) as state:
        state.restore()
        train(args, journal, task, task.model, state)


def train(args: argparse.Namespace, journal: Journal, task: Task, module: torch.nn.Module, state: Any) -> None:
    """Steps from where `state` stands, with a commit now and then."""
    rank, size = dist.get_rank(), dist.get_world_size()
    journal.joined(state.steps)
    while not task.is_over(state.steps):
        loss = task.loss(module, task.batch(state.steps, rank, size))
        loss.backward()
        task.optimizer.step()
        task.optimizer.zero_grad()
        state.steps += 1
        began = task.model.began
        journal.step(state.steps - 1, began, rank=rank, size=size, applied=True, digest=task.digest())
        if state.steps % args.commit_every == 0:
            state.commit()
    journal.write(state_bytes=state_bytes(task))
    journal.finished(state.steps, task.held_out_loss())


if __name__ == "__main__":
    main()

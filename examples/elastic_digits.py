"""Handwritten digits on ranks that come and go: kill one, kill a host, bring it back, and the training goes on.

bagua run --nproc-per-node 2 --max-restarts 3 examples/elastic_digits.py
bagua lab run --hosts 3 --keep-going --at 40s:kill:2 --at 60s:start:2 -- \
    bagua run --nnodes 2:3 --max-restarts 3 --rdzv-conf last_call_timeout=3,keep_alive_interval=1 \
    examples/elastic_digits.py --epochs 40 --step-ms 50

The batch of all ranks together stays the same, so the number of ranks changes nothing but the time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from digits import DigitsNet, accuracy, load_data
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bagua
from bagua import elastic


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Handwritten digits on ranks that come and go.")
    parser.add_argument("--algorithm", default="gradient_allreduce", metavar="NAME", help="%(default)s")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data (%(default)s)")
    parser.add_argument("--global-batch", type=int, default=48, help="images of all ranks in a step (48)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument(
        "--commit-every", type=int, default=10, metavar="STEPS", help="between two commits (%(default)s)"
    )
    parser.add_argument("--directory", type=Path, help="commits on the disk; all hosts must see it")
    parser.add_argument("--disk-every", type=int, default=5, metavar="COMMITS",
                        help="between two that go to --directory (%(default)s)")  # fmt: skip
    parser.add_argument("--step-ms", type=float, default=0, help="make steps longer, to have time for an accident")
    parser.add_argument("--timeout", type=float, default=60, metavar="S", help="to wait for a rank that is silent")
    parser.add_argument("--data", type=Path, metavar="FILE", help="from `save_data`; starts faster than scikit-learn")
    parser.add_argument(
        "--journal", type=Path, metavar="DIR", help="write there which images each step used, and the end"
    )
    return parser


class Journal:
    """What this process did, a JSON line each, in a file of its own; None writes nothing."""

    def __init__(self, folder: Path | None, rank: int, size: int) -> None:
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / f"{time.time_ns()}-{rank}.jsonl", "w", buffering=1)  # noqa: SIM115
        meeting = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        host = int(os.environ.get("BAGUA_LAB_HOST", "0"))
        self.write(began=time.time(), rank=rank, size=size, meeting=meeting, host=host, pid=os.getpid())

    def write(self, **facts: Any) -> None:
        """Add a line."""
        if self._file is not None:
            self._file.write(json.dumps(facts) + "\n")


def save_data(path: Path) -> None:
    """Write what `--data` reads."""
    torch.save([each.tensors for each in load_data()], path)


def read_data(path: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Return the training set and the test set, from `path` or from scikit-learn."""
    if path is None:
        return load_data()
    train, test = torch.load(path, weights_only=True)
    return TensorDataset(*train), TensorDataset(*test)


def start(timeout_s: float) -> tuple[int, int]:
    """Join the other ranks; return rank and number of ranks."""
    bagua.init_process_group(timeout=timedelta(seconds=timeout_s))
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def main(argv: Sequence[str] | None = None) -> None:
    """Train, from the last commit if there is one."""
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    rank, size = start(args.timeout)
    journal = Journal(args.journal, rank, size)
    torch.manual_seed(args.seed + rank)
    train, test = read_data(args.data)
    numbered = TensorDataset(*train.tensors, torch.arange(len(train)))

    model = DigitsNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    bagua.distribute(model, optimizer, args.algorithm)

    def resized(change: elastic.Resize) -> None:
        if rank == 0:
            print(f"{change.new} ranks, before {change.old}: {change.split(args.global_batch)} images each", flush=True)

    sampler = elastic.Sampler(numbered, seed=args.seed)
    state = elastic.State(
        model,
        optimizer,
        sampler,
        scheduler=scheduler,
        steps=0,
        directory=args.directory,
        disk_every=args.disk_every,
        on_resize=resized,
    )
    with state:
        restored = state.restore()
        if rank == 0:
            print(f"{size} ranks {beginning(restored, state.steps)}", flush=True)
        journal.write(restored=None if restored is None else restored.number, step=state.steps)
        batch_size = elastic.Resize(size, size).split(args.global_batch)
        loader = DataLoader(numbered, batch_size=batch_size, sampler=sampler)
        for epoch in range(sampler.epoch, args.epochs):
            sampler.set_epoch(epoch)
            for images, labels, indices in sampler.track(loader):
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                state.steps += 1
                journal.write(step=state.steps, epoch=epoch, samples=indices.tolist())
                time.sleep(args.step_ms / 1000)
                if state.steps % args.commit_every == 0:
                    state.commit()
                    journal.write(committed=state.number, step=state.steps)
            scheduler.step()
            sampler.set_epoch(epoch + 1)  # before the commit: one that is restored must not end the epoch again
            state.commit()
            journal.write(committed=state.number, step=state.steps)
            if rank == 0:
                print(f"epoch {epoch + 1}/{args.epochs}  {size} ranks  test {accuracy_of(model, test):.2%}", flush=True)
        right = accuracy_of(model, test)
        journal.write(ended=True, accuracy=right)
    if rank == 0:
        print(f"{args.algorithm}: {right:.2%} of the test images right after {state.steps} steps", flush=True)
    bagua.destroy_process_group()


def beginning(restored: elastic.Restored | None, step: int) -> str:
    """Return in words where a training begins."""
    if restored is None:
        return "begin at the beginning: there is no commit yet"
    return f"go on at step {step}: commit {restored.number} of {restored.size} ranks, found in {restored.source}"


def accuracy_of(model: torch.nn.Module, test: TensorDataset) -> float:
    """Return the fraction of the test images that the model gets right."""
    return accuracy(model, test, torch.device("cpu"))


if __name__ == "__main__":
    main()

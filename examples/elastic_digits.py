"""Handwritten digits on ranks that come and go: kill one, kill a host, bring it back, and the training goes on.

bagua run --nproc-per-node 2 --max-restarts 3 examples/elastic_digits.py
bagua lab run --hosts 3 --keep-going --at 40s:kill:2 --at 60s:start:2 -- \
    bagua run --nnodes 2:3 --max-restarts 3 --rdzv-conf last_call_timeout=3,keep_alive_interval=1 \
    examples/elastic_digits.py --epochs 40 --step-ms 50
bagua lab run --hosts 4 --keep-going --at 14s:kill:2 --at 30s:start:2 -- \
    bagua run --fault-tolerant examples/elastic_digits.py --algorithm bytegrad --epochs 30 --step-ms 50

With --fault-tolerant the other ranks train on in their processes; without, all restart from the last commit. The batch
of all ranks together stays the same, so the number of ranks changes nothing but the time.
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
from digits import DigitsNet, accuracy, add_elastic_options, choose_device, load_data, make_optimizer, make_options
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bagua
from bagua import elastic


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Handwritten digits on ranks that come and go.")
    add_elastic_options(parser)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data (%(default)s)")
    parser.add_argument(
        "--commit-every", type=int, default=10, metavar="STEPS", help="between two commits (%(default)s)"
    )
    parser.add_argument("--directory", type=Path, help="commits on the disk; all hosts must see it")
    parser.add_argument("--disk-every", type=int, default=5, metavar="COMMITS",
                        help="between two that go to --directory (%(default)s)")  # fmt: skip
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


def main(argv: Sequence[str] | None = None) -> None:
    """Train, from where the others are or from the last commit, if there is one."""
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    fault_tolerant = elastic.is_fault_tolerant()  # then `distribute` opens the process groups
    if not fault_tolerant:
        bagua.init_process_group(timeout=timedelta(seconds=args.timeout))
    torch.manual_seed(args.seed)
    train, test = read_data(args.data)
    numbered = TensorDataset(*train.tensors, torch.arange(len(train)))

    device = choose_device(args.device)
    model = DigitsNet().to(device)
    optimizer = make_optimizer(args.algorithm, model.parameters(), args.lr, sgd_lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    options = make_options(args.algorithm)
    bagua.distribute(model, optimizer, args.algorithm, fault_tolerant=fault_tolerant, **options)
    rank, size = bagua.stats(model).rank, bagua.stats(model).size
    torch.manual_seed(args.seed + rank)
    journal = Journal(args.journal, rank, size)

    def resized(change: elastic.Resize) -> None:
        for each in bagua.stats(model).membership[-1:]:
            print(f"lost {each.lost}, joined {each.joined}: {each.stalled_s:.2f} s", flush=True)
        if sampler.rank == 0:
            share = args.global_batch / change.new
            print(f"{change.new} ranks, before {change.old}: {share:g} images each", flush=True)

    sampler = elastic.Sampler(numbered, seed=args.seed, global_batch_size=args.global_batch)
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
        if rank == 0 or fault_tolerant:
            print(f"{size} ranks {beginning(restored, state.steps)}", flush=True)
        journal.write(restored=None if restored is None else restored.number, step=state.steps)
        loader = DataLoader(numbered, batch_sampler=sampler)
        for epoch in range(sampler.epoch, args.epochs):
            sampler.set_epoch(epoch)
            for images, labels, indices in sampler.track(loader):
                loss = F.cross_entropy(model(images.to(device)), labels.to(device))
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
            if sampler.rank == 0:
                right, size = accuracy(model, test, device), sampler.num_replicas
                print(f"epoch {epoch + 1}/{args.epochs}  {size} ranks  test {right:.2%}", flush=True)
        bagua.average_parameters(model)  # they may differ
        right = accuracy(model, test, device)
        journal.write(ended=True, accuracy=right)
    if sampler.rank == 0:
        print(f"{args.algorithm}: {right:.2%} of the test images right after {state.steps} steps", flush=True)
    bagua.destroy_process_group()


def beginning(restored: elastic.Restored | None, step: int) -> str:
    """Return in words where a training begins."""
    if restored is None:
        return "begin at the beginning: there is no commit yet"
    return f"go on at step {step}: commit {restored.number} of {restored.size} ranks, found in {restored.source}"


if __name__ == "__main__":
    main()

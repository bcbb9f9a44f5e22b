"""Handwritten digits on hosts that may be lost and come back, counted in steps, without an elastic sampler.

bagua run --fault-tolerant --nnodes 1 examples/fault_tolerant_digits.py
bagua lab run --hosts 4 --keep-going --at 10s:kill:2 --at 20s:start:2 -- \
    bagua run --fault-tolerant examples/fault_tolerant_digits.py --algorithm bytegrad --step-ms 50

Which images a step uses follows from its number and from who trains, so ranks that come late need no other state. The
step in which the members change uses some images twice or not at all; elastic_digits.py uses each once in an epoch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from digits import DigitsNet, accuracy, add_elastic_options, choose_device, load_data, make_optimizer, make_options
from torch.nn import functional as F

import bagua


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Handwritten digits on hosts that come and go.")
    parser.add_argument("--steps", type=int, default=600, help="steps that count (%(default)s)")
    add_elastic_options(parser)
    return parser


def batch_of(step: int, num_images: int, global_batch: int, seed: int) -> torch.Tensor:
    """The images of one step on all ranks together: passes over the data, each in an order of its own."""
    per_pass = num_images // global_batch
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(seed + step // per_pass))
    return order[(step % per_pass) * global_batch :][:global_batch]


def main(argv: Sequence[str] | None = None) -> None:
    """Train until so many steps count."""
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train, test = load_data()
    images, labels = train.tensors
    device = choose_device(args.device)
    images, labels = images.to(device), labels.to(device)
    model = DigitsNet().to(device)
    small = 0.01 if args.algorithm == "diloco" else 0.05
    optimizer = make_optimizer(args.algorithm, model.parameters(), args.lr, sgd_lr=small)
    bagua.distribute(model, optimizer, args.algorithm, fault_tolerant=True, **make_options(args.algorithm))
    now = bagua.stats(model)
    print(f"rank {now.rank} of {now.size} begins at step {now.steps}", flush=True)
    known = 0
    while (now := bagua.stats(model)).steps < args.steps:
        mine = batch_of(now.steps, len(images), args.global_batch, args.seed)[now.rank :: now.size]
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for change in bagua.stats(model).membership[known:]:
            known += 1
            print(
                f"step {change.step}: lost {change.lost}, joined {change.joined}, {change.stalled_s:.2f} s", flush=True
            )
        time.sleep(args.step_ms / 1000)
    right = accuracy(model, test, device)
    if bagua.stats(model).rank == 0:
        print(f"{args.algorithm}: {right:.2%} of the test images right after {args.steps} steps", flush=True)


if __name__ == "__main__":
    main()

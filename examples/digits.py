"""Train a small convolutional net on handwritten digits, data-parallel with Bagua.

python examples/digits.py                                            one process
torchrun --nproc-per-node 2 examples/digits.py                       two ranks on this machine
bagua run --nproc-per-node 2 examples/digits.py --algorithm bytegrad
bagua run --nproc-per-node 2 examples/digits.py --algorithm auto       measures, chooses, and says why

The data (1797 images of 8 x 8 pixels) comes with scikit-learn, which `pip install '.[demo]'` brings; nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bagua


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers; 588,076 parameters, most of them in `hidden`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 550)
        self.out = nn.Linear(550, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, 10] of images [B, 1, 8, 8]."""
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.dropout(x.flatten(1), 0.25, self.training)
        x = F.dropout(F.relu(self.hidden(x)), 0.25, self.training)
        return self.out(x)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training set (1437 images) and the test set (360), the same split every time."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        raise SystemExit(f"digits: {error.name} is not installed: pip install '.[demo]'") from None

    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    x_train, x_test, y_train, y_test = (torch.from_numpy(part) for part in parts)

    def dataset(x: Tensor, y: Tensor) -> TensorDataset:
        return TensorDataset((x.float() / 16).view(-1, 1, 8, 8), y.long())

    return dataset(x_train, y_train), dataset(x_test, y_test)


def make_optimizer(
    algorithm: str, params: Iterable[torch.nn.Parameter], lr: float | None, sgd_lr: float = 0.1
) -> torch.optim.Optimizer:
    """Return SGD with momentum, or the optimizer that belongs to `algorithm`, whose momentum travels compressed.

    Args:
        lr: None takes `sgd_lr`, or 0.002 for the others.
    """
    rate = 2e-3 if lr is None else lr
    if algorithm == "qadam":
        return bagua.optim.QAdam(params, lr=rate, warmup_steps=60)
    if algorithm == "one_bit_lamb":
        return bagua.optim.OneBitLamb(params, lr=5 * rate, warmup_steps=60)
    if algorithm == "zero_one_adam":
        return bagua.optim.ZeroOneAdam(params, lr=rate, var_freeze_step=60, local_step_scaler=200)
    return torch.optim.SGD(params, lr=sgd_lr if lr is None else lr, momentum=0.9)


def make_options(algorithm: str) -> dict[str, Any]:
    """Return options that fit steps as short as these."""
    return {"async": {"sync_interval_ms": 10}}.get(algorithm, {})


def replicas_differ(algorithm: str) -> bool:
    """Whether ranks hold different weights in the course of the training; may be, if the algorithm is chosen."""
    if algorithm == "auto":
        return True
    row = next(row for row in bagua.algorithms.available() if row.name == algorithm)
    return row.exactness not in ("exact", "lossy synchronous")


def make_loader(data: TensorDataset, batch_size: int, seed: int, rank: int, size: int) -> DataLoader:
    """Return this rank's shard in batches; call `loader.sampler.set_epoch(epoch)` before each epoch."""
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, seed=seed, drop_last=True)
    return DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=True)


def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Return the fraction of `data` that `model` gets right."""
    images, labels = (tensor.to(device) for tensor in data.tensors)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    model.train(was_training)
    return right


def choose_device(name: str) -> torch.device:
    """Return the device of this rank; "auto" takes a GPU if there is one for every rank of this machine."""
    local_rank, local_size = (int(os.environ.get(key, d)) for key, d in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    if name == "auto":
        name = "cuda" if torch.cuda.device_count() >= local_size else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.device_count() < local_size:
        raise SystemExit(f"--device cuda: {torch.cuda.device_count()} GPUs for {local_size} ranks on this machine")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def add_elastic_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the examples in which ranks come and go."""
    parser.add_argument("--algorithm", default="gradient_allreduce", metavar="NAME", help="%(default)s")
    parser.add_argument("--global-batch", type=count, default=48, help="images of all ranks in a step (48)")
    parser.add_argument("--lr", type=float, help="learning rate; default: 0.05 with SGD, 0.002 with the others")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument("--step-ms", type=float, default=0, help="make steps longer, to have time for an accident")
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="cpu", help="where to train (%(default)s)")


def count(text: str) -> int:
    """Read a number of the command line that is 1 at least."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, not {text}")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Handwritten digits, data-parallel with Bagua.")
    names = [*(row.name for row in bagua.algorithms.available()), "auto"]
    parser.add_argument("--algorithm", choices=names, default="gradient_allreduce", metavar="NAME",
                        help=f"one of: {', '.join(names)} (default: %(default)s)")  # fmt: skip
    parser.add_argument("--epochs", type=count, default=10, help="passes over the data (%(default)s)")
    parser.add_argument("--batch-size", type=count, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=None, help="default: 0.1 with SGD, 0.002 with the others")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument("--hierarchical", action="store_true", default=None, help="exact within a node")
    parser.add_argument("--bucket-bytes", type=count, default=None, help="bucket size in bytes")
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="auto",
                        help="auto: a GPU if there is one for each rank of this machine (%(default)s)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Train, and print on rank 0 how it goes."""
    args = build_parser().parse_args(argv)
    device = choose_device(args.device)
    train, test = load_data()
    bagua.init_process_group()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(args.seed + rank)  # dropout differs by rank; weights become those of rank 0
    if device.type == "cpu":
        torch.set_num_threads(1)  # images this small are slower with more

    loader = make_loader(train, args.batch_size, args.seed, rank, size)
    model = DigitsNet().to(device)
    optimizer = make_optimizer(args.algorithm, model.parameters(), args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    options = make_options(args.algorithm)
    model = bagua.distribute(
        model, optimizer, args.algorithm, hierarchical=args.hierarchical, bucket_bytes=args.bucket_bytes, **options
    )

    started = time.perf_counter()
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
        losses = []
        for step, (images, labels) in enumerate(loader, 1):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if rank == 0 and sys.stdout.isatty():
                print(f"\repoch {epoch + 1}/{args.epochs}  step {step}/{len(loader)}", end="", flush=True)
        scheduler.step()
        right = accuracy(model, test, device)
        if rank == 0:
            mean_loss = torch.stack(losses).mean().item() if losses else float("nan")
            start = "\r" if sys.stdout.isatty() else ""
            print(f"{start}epoch {epoch + 1}/{args.epochs}  loss {mean_loss:.4f}  test {right:.2%}", flush=True)
    seconds = time.perf_counter() - started

    if replicas_differ(args.algorithm):
        bagua.average_parameters(model)
    stats = bagua.stats(model)
    right = accuracy(model, test, device)
    if rank == 0:
        print(f"{stats.algorithm} on {size} rank{'s' * (size > 1)}: {right:.2%} of the test images right")
        print(
            f"{stats.steps} steps in {seconds:.1f} s; {stats.total.bytes_sent / stats.steps / 1e6:.3f} MB sent per "
            f"step and rank; compression {stats.total.compression_ratio:.2f}"
        )
        for notice in stats.notices:
            print(f"note: {notice}")
        if args.algorithm == "auto":
            print(bagua.explain(model))
    if rank == 0 and args.json is not None:
        result = {
            "algorithm": args.algorithm,
            "options": stats.algorithm,
            "ranks": size,
            "device": str(device),
            "epochs": args.epochs,
            "steps": stats.steps,
            "seconds": seconds,
            "test_accuracy": right,
            "mb_sent_per_step": stats.total.bytes_sent / stats.steps / 1e6,
            "compression_ratio": stats.total.compression_ratio,
            "exposed_s": stats.total.exposed_s,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    bagua.destroy_process_group()


if __name__ == "__main__":
    main()

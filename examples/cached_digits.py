"""Train on handwritten digits whose preprocessing is slow, and compute each sample only once.

python examples/cached_digits.py                                                one process, cache on disk
bagua run --nproc-per-node 2 examples/cached_digits.py --workers 2              two ranks share one cache
bagua run --nproc-per-node 2 examples/cached_digits.py --backend redis          on a Redis server of the job's own

Each image is enlarged and sharpened by a filter that is slow on purpose, which is the same in every epoch; the random
shift behind the cache is not. The first epoch computes, the others read. Needs `pip install '.[cache,demo]'`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import bagua
from bagua.data import CachedDataset


class SlowDigits(Dataset[tuple[Tensor, int]]):
    """Images [1, 32, 32] of `load_digits`, each filtered for some milliseconds."""

    def __init__(self, rounds: int) -> None:
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError as error:
            raise SystemExit(f"cached_digits: {error.name} is not installed: pip install '.[cache,demo]'") from None
        images, labels = load_digits(return_X_y=True)
        self.images = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
        self.labels, self.rounds = labels.tolist(), rounds

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = F.interpolate(self.images[index : index + 1], size=32, mode="bicubic")
        for _ in range(self.rounds):
            blurred = F.avg_pool2d(F.pad(image, (2, 2, 2, 2), mode="reflect"), 5, stride=1)
            image = (image + 0.02 * (image - blurred)).clamp(0, 1)
        return image[0], self.labels[index]


def collate(batch: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Stack, and shift the images at random: what differs from epoch to epoch is done behind the cache."""
    images = torch.stack([image for image, _ in batch])
    dx, dy = torch.randint(-2, 3, (2,)).tolist()
    return torch.roll(images, (dy, dx), (2, 3)), torch.tensor([label for _, label in batch])


def make_model() -> nn.Module:
    """Return a small convolutional net for images [B, 1, 32, 32]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip


def count(text: str) -> int:
    """Read a number of the command line that is 1 at least."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, not {text}")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Handwritten digits with slow preprocessing, cached.")
    parser.add_argument("--backend", choices=["lmdb", "memory", "redis"], default="lmdb",
                        help="keep samples in a file, this process or Redis servers (%(default)s)")  # fmt: skip
    parser.add_argument("--path", help='where "lmdb" keeps its file; default: a directory that goes with the job')
    parser.add_argument("--epochs", type=count, default=4, help="passes over the images (%(default)s)")
    parser.add_argument("--batch-size", type=count, default=32, help="images per rank and step")
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers per rank")
    parser.add_argument("--rounds", type=count, default=100, help="of the slow filter")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Train, and print on rank 0 how long the epochs take."""
    args = build_parser().parse_args(argv)
    if args.backend == "memory" and args.workers:
        raise SystemExit('--backend memory: workers do not share it; take "lmdb", or --workers 0')
    bagua.init_process_group()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    options: dict[str, Any] = {"path": args.path} if args.path else {}
    data = CachedDataset(SlowDigits(args.rounds), args.backend, f"digits-{args.rounds}", **options)
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, drop_last=True)
    loader = DataLoader(
        data,
        args.batch_size,
        sampler=sampler,
        collate_fn=collate,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    model = bagua.distribute(model, optimizer, "gradient_allreduce")

    seconds, accuracy = [], 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        began, right, seen = time.perf_counter(), 0, 0
        for images, labels in loader:
            logits = model(images)
            F.cross_entropy(logits, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            right, seen = right + int((logits.argmax(1) == labels).sum()), seen + len(labels)
        seconds.append(time.perf_counter() - began)
        accuracy = right / seen
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs}  {seconds[-1]:.2f} s  training accuracy {accuracy:.1%}", flush=True)
    data.flush()
    if rank == 0:
        status = data.cache_loader.status()
        print(f"{status.num_keys} samples cached, {status.used_bytes / 1e6:.1f} MB; later epochs took "
              f"{min(seconds[1:], default=seconds[0]) / seconds[0]:.0%} of the first")  # fmt: skip
        if args.json:
            result = {"epoch_s": seconds, "accuracy": accuracy, "num_keys": status.num_keys, "backend": args.backend}
            args.json.write_text(json.dumps(result) + "\n")
    bagua.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

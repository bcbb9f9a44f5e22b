"""Train handwritten digits with every algorithm and with DistributedDataParallel; show what each costs.

python examples/demo.py [--out out/demo] [--quick]

Starts two processes on this machine, or takes part as a rank under `torchrun` or `bagua run`. Writes
demo.json, demo.png and demo.svg.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import digits
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import bagua
from bagua.bench import canvas, results_file
from bagua.bench.layout import Columns

DDP = "torch DDP"
Data = tuple[TensorDataset, TensorDataset]  # training and test


@dataclass(frozen=True)
class Row:
    """What one way of training gave, on rank 0.

    Attributes:
        algorithm: registry name, or "torch DDP".
        test_accuracy: fraction of the test images.
        step_ms: mean time of a whole training step.
        mb_per_step: megabytes (10^6 bytes) sent by a rank; for DDP those of a ring all-reduce.
        compression_ratio: how many times less that is than a ring all-reduce in full precision; None if nothing was
            sent, in a run shorter than an algorithm's interval.
        exposed_ms: mean time a step waits for communication. Bagua: `bagua.stats`; DDP: from the last
            gradient to the end of `backward()`.
        steps: training steps.
    """

    algorithm: str
    test_accuracy: float
    step_ms: float
    mb_per_step: float
    compression_ratio: float | None
    exposed_ms: float
    steps: int


class LastGradient:
    """Remembers when the last gradient of a backward pass came."""

    def __init__(self, model: nn.Module) -> None:
        self.at = 0.0
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self)

    def __call__(self, _param: torch.Tensor) -> None:
        self.at = time.perf_counter()


class Run:
    """Training from scratch with one algorithm, on this rank; all ranks make the same calls."""

    def __init__(self, name: str, args: argparse.Namespace, data: tuple[TensorDataset, TensorDataset]) -> None:
        rank, self.size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed + rank)
        self.name, self.test_set = name, data[1]
        self.model = digits.DigitsNet()
        self.loader = digits.make_loader(data[0], args.batch_size, args.seed, rank, self.size)
        self.optimizer = digits.make_optimizer(name, self.model.parameters(), None)
        self.step_s: list[float] = []
        self.exposed_s: list[float] = []
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, args.epochs)
        self.random_state = torch.get_rng_state()
        self.trained: nn.Module = self.model
        self.last_gradient: LastGradient | None = None
        self.exposed_so_far = 0.0
        if name == DDP:
            self.last_gradient = LastGradient(self.model)
            self.trained = DistributedDataParallel(self.model, bucket_cap_mb=args.bucket_bytes / 2**20)
        else:
            options = digits.make_options(name)
            bagua.distribute(self.model, self.optimizer, name, bucket_bytes=args.bucket_bytes, **options)

    def epoch(self, number: int, say: Callable[[str], None]) -> None:
        """Train for one epoch."""
        torch.set_rng_state(self.random_state)  # dropout alike in all runs
        self.loader.sampler.set_epoch(number)  # pyright: ignore[reportAttributeAccessIssue]
        for step, (images, labels) in enumerate(self.loader, 1):
            started = time.perf_counter()
            F.cross_entropy(self.trained(images), labels).backward()
            backward_ended = time.perf_counter()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step_s.append(time.perf_counter() - started)
            if self.last_gradient is not None:
                self.exposed_s.append(backward_ended - self.last_gradient.at)
            else:
                total = bagua.stats(self.model).total.exposed_s
                self.exposed_s.append(total - self.exposed_so_far)
                self.exposed_so_far = total
            say(f"{self.name}: step {step}/{len(self.loader)}")
        self.scheduler.step()
        self.random_state = torch.get_rng_state()

    def accuracy(self) -> float:
        """Return the fraction of the test images that this rank's model gets right."""
        return digits.accuracy(self.model, self.test_set, torch.device("cpu"))

    def row(self) -> Row:
        """Return what came out; ranks that hold different weights take their mean first."""
        if self.name != DDP and digits.replicas_differ(self.name):
            bagua.average_parameters(self.model)
        stats = bagua.stats(self.model) if self.name != DDP else None
        dense_bytes = sum(param.numel() * param.element_size() for param in self.model.parameters())
        dense_mb = 2 * (self.size - 1) / self.size * dense_bytes / 1e6
        mb = stats.total.bytes_sent / stats.steps / 1e6 if stats else dense_mb
        warmup = len(self.loader) if len(self.step_s) > len(self.loader) else 0  # the first epoch
        return Row(
            algorithm=self.name,
            test_accuracy=self.accuracy(),
            step_ms=1000 * statistics.mean(self.step_s[warmup:]),
            mb_per_step=mb,
            compression_ratio=dense_mb / mb if mb else None,
            exposed_ms=1000 * statistics.mean(self.exposed_s[warmup:]),
            steps=len(self.step_s),
        )

    def close(self) -> None:
        """Take the engine off."""
        if self.name != DDP:
            bagua.detach(self.model)


def table(rows: list[Row]) -> str:
    """Return the rows as text."""
    columns = Columns(
        ("algorithm", -28), ("test accuracy", 14), ("step ms", 10), ("MB/step", 10), ("compression", 13),
        ("exposed ms", 12)
    )  # fmt: skip
    lines: list[list[str]] = []
    for row in rows:
        ratio = f"{row.compression_ratio:.2f}x" if row.compression_ratio else "-"
        cells = [row.algorithm, f"{row.test_accuracy:.2%}", f"{row.step_ms:.1f}", f"{row.mb_per_step:.3f}"]
        lines.append([*cells, ratio, f"{row.exposed_ms:.2f}"])
    return columns.table(lines)


def plot(rows: list[Row], size: int, folder: Path) -> None:
    """Write demo.png and demo.svg: bytes on the left, time on the right."""
    names = [f"{row.algorithm}\n{row.test_accuracy:.1%} test accuracy" for row in rows]
    places = list(range(len(rows)))
    colours = ["#8a8f98" if row.algorithm == DDP else "#2a6fbb" for row in rows]
    with canvas.drawing(font_size=10) as plt:
        size_in = (10, 1.5 + 0.72 * len(rows))
        figure, (left, right) = plt.subplots(1, 2, figsize=size_in, sharey=True, layout="constrained")
        left.barh(places, [row.mb_per_step for row in rows], color=colours, height=0.56)
        for place, row in zip(places, rows, strict=True):
            ratio = f"  ({row.compression_ratio:.1f}x less)" if (row.compression_ratio or 0) > 1.05 else ""
            left.text(row.mb_per_step, place, f" {row.mb_per_step:.2f}{ratio}", va="center")
        left.set_title("Sent per step and rank, MB", loc="left")
        left.set_yticks(places, names)
        left.invert_yaxis()
        left.set_xlim(0, 1.22 * max(row.mb_per_step for row in rows))

        hidden = [max(row.step_ms - row.exposed_ms, 0) for row in rows]
        right.barh(places, hidden, color=colours, height=0.56)
        right.barh(places, [row.exposed_ms for row in rows], left=hidden, color="#e08b2d", height=0.56,
                   label="waiting for communication")  # fmt: skip
        for place, row in zip(places, rows, strict=True):
            right.text(row.step_ms, place, f" {row.step_ms:.1f}, waiting {row.exposed_ms:.1f}", va="center")
        right.set_title("Mean training step, ms", loc="left")
        right.set_xlim(0, 1.55 * max(row.step_ms for row in rows))
        figure.legend(loc="outside lower right", frameon=False)
        for axes in (left, right):
            canvas.tidy(axes, grid="x")
            axes.tick_params(axis="y", length=0)
        figure.suptitle(f"Handwritten digits on {size} ranks, CPU, gloo", x=0.01, ha="left", weight="bold")
        canvas.save(figure, [folder / f"demo.{kind}" for kind in ("png", "svg")], dpi=150)


def rank_main(args: argparse.Namespace) -> None:
    """Train everything on this rank; rank 0 shows, prints and writes."""
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    live = rank == 0 and sys.stdout.isatty()

    def say(text: str) -> None:
        if live:
            print(f"\r\x1b[K{text}", end="", flush=True)

    data = digits.load_data()
    names = [DDP, *(row.name for row in bagua.algorithms.available())]
    runs = [Run(name, args, data) for name in names]
    for epoch in range(args.epochs):  # in turns, so that what else runs on the machine hits all alike
        for run in runs:
            run.epoch(epoch, lambda text, epoch=epoch: say(f"epoch {epoch + 1}/{args.epochs}, {text}"))
        if rank == 0:
            start = "\r\x1b[K" if live else ""
            now = ", ".join(f"{run.name} {run.accuracy():.1%}" for run in runs)
            print(f"{start}epoch {epoch + 1}/{args.epochs}: {now}", flush=True)
    rows = [run.row() for run in runs]
    for run in runs:
        run.close()
    if rank == 0:
        print(f"\n{table(rows)}\n")
        print("MB/step: sent per rank. exposed ms: the part of a step that waits for communication.")
        report: dict[str, Any] = {
            "command": " ".join(["python", "examples/demo.py", *sys.argv[1:]]),
            "ranks": size,
            "cores": os.cpu_count(),
            "backend": "gloo",
            "torch": torch.__version__,
            "batch_size": args.batch_size,
            "bucket_bytes": args.bucket_bytes,
            "epochs": args.epochs,
            "rows": [asdict(row) for row in rows],
        }
        results_file.write(args.out / "demo.json", report, indent=2)
        plot(rows, size, args.out)
        print(f"written: {', '.join(str(args.out / f'demo.{kind}') for kind in ('json', 'png', 'svg'))}")


def _spawned(rank: int, port: int, size: int, args: argparse.Namespace) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    bagua.init_process_group("gloo", store=store, rank=rank, world_size=size)
    rank_main(args)
    bagua.destroy_process_group()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="All algorithms on handwritten digits, beside DDP.")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for results (default: %(default)s)")
    parser.add_argument("--ranks", type=digits.count, default=2, help="processes to start (default: %(default)s)")
    parser.add_argument("--epochs", type=digits.count, default=6, help="passes over the data (%(default)s)")
    parser.add_argument("--batch-size", type=digits.count, default=32, help="images per rank and step (%(default)s)")
    parser.add_argument("--bucket-bytes", type=int, default=512 * 1024, help="bucket size in bytes (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one epoch of large batches")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    args = build_parser().parse_args(argv)
    if args.quick:
        args.epochs, args.batch_size = 1, 128
    if "RANK" in os.environ:
        bagua.init_process_group("gloo")
        rank_main(args)
        bagua.destroy_process_group()
        return 0
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = (store.port, args.ranks, args)
    ranks = mp.start_processes(_spawned, job, args.ranks, join=False, daemon=True, start_method="spawn")
    assert ranks is not None
    try:
        while not ranks.join():  # raises with the traceback of a rank that failed, after ending the others
            continue
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        print(f"\ndemo: a rank failed\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        for process in ranks.processes:
            if process is not None:
                process.terminate()
        print("\ndemo: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell script starts `... &` with it ignored
    sys.exit(main())

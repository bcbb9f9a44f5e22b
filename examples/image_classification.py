"""Classify images with ResNet, VGG-16 or another net, data-parallel with Bagua.

python examples/image_classification.py                                               digits on one process
bagua run --nproc-per-node 2 examples/image_classification.py --algorithm bytegrad --save-checkpoint out/images
bagua run --nproc-per-node 8 examples/image_classification.py /data/imagenet -a resnet50 --amp -j 8     on GPUs

Without a directory it learns scikit-learn's handwritten digits, which nothing is downloaded for. The flags are those of
the original's ImageNet script.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

import bagua
from bagua.sys_perf.catalogue import OWN, choose

DEFAULTS = {  # with a directory of images, and with digits
    "epochs": (90, 4),
    "warmup_epochs": (5.0, 0.5),
    "batch_size": (256, 32),
    "lr": (0.1, 0.05),
    "image_size": (224, 32),
    "scale": (1.0, 0.25),
}
TOP, PROFILED = 5, 10
Split = Dataset[Any]


class Scores(NamedTuple):
    """Mean loss, and how often the label was the first guess or among the first five, in percent."""

    loss: float
    top1: float
    top5: float

    def __str__(self) -> str:
        return f"validation: loss {self.loss:.4f}  right {self.top1:.2f} %  among the first five {self.top5:.2f} %"


def count(text: str) -> int:
    """Read a number of the command line that is 1 at least."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, not {text}")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Image classification, data-parallel with Bagua.")
    names = [row.name for row in bagua.algorithms.available()]
    add = parser.add_argument
    add(
        "data",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="with train/CLASS/*.jpeg and val/CLASS/*.jpeg; default: digits",
    )
    arches = ", ".join(name for name in OWN if "bert" not in name)
    add("-a", "--arch", default="resnet18", help=f"{arches}, or a classifier of an installed torchvision (%(default)s)")
    add("-j", "--workers", type=int, default=0, metavar="N", help="data loading processes per rank (%(default)s)")
    add("--epochs", type=count, help="in all (90; digits: 4)")
    add("--warmup-epochs", type=float, help="in which the learning rate grows (5; digits: 0.5)")
    add("--start-epoch", type=int, default=0, help="number of the first one, without --resume (%(default)s)")
    add("-b", "--batch-size", type=count, help="images per rank and step (256; digits: 32)")
    add("--lr", "--learning-rate", type=float, help="highest learning rate (0.1; digits: 0.05)")
    add("--momentum", type=float, default=0.9, help="of SGD (%(default)s)")
    add("--wd", "--weight-decay", dest="weight_decay", type=float, default=1e-4, help="%(default)s")
    add("--milestones", metavar="E,E,...", help="epochs at which the rate drops (60,70,80 of 90, and so in proportion)")
    add("--gama", type=float, default=0.2, help="factor by which it drops (%(default)s)")
    add("-p", "--print-freq", type=count, default=10, metavar="N", help="steps between two lines (%(default)s)")
    add("--resume", type=Path, metavar="DIR", help="go on from the newest checkpoint there, if there is one")
    add("--save-checkpoint", nargs="?", const=Path("out/image_classification"), type=Path, metavar="DIR",
        help="save after each epoch (%(const)s)")  # fmt: skip
    add("-e", "--evaluate", action="store_true", help="measure on the validation images, and stop")
    add("--pretrained", action="store_true", help="torchvision's weights; downloads them")
    add("--seed", type=int, default=0, help="%(default)s")
    add("--amp", action="store_true", help="mixed precision: fp16 with loss scaling on a GPU, bf16 on a CPU")
    add("--prof", type=int, default=-1, metavar="STEP", help="profile ten steps from this one, print, and stop")
    add("--algorithm", choices=names, default="gradient_allreduce", metavar="NAME", help=f"one of {', '.join(names)}")
    add("--async-sync-interval", type=int, default=100, help="of the algorithm async, milliseconds (%(default)s)")
    add("--image-size", type=count, help="side in pixels (224; digits: 32)")
    add("--scale", type=float, help="factor of the widths of the net (1; digits: 0.25)")
    add("--no-cuda", action="store_true", help="stay on the CPU")
    return parser


def load_data(args: argparse.Namespace) -> tuple[Split, Split, int]:
    """Return training set, validation set and number of classes."""
    if args.data is not None:
        from image_folder import ImageFolder, center_crop, random_crop

        try:
            train = ImageFolder(args.data / "train", random_crop(args.image_size))
            val = ImageFolder(args.data / "val", center_crop(args.image_size))
        except FileNotFoundError as error:
            raise SystemExit(f"DIR: {error}") from None
        if train.classes != val.classes:
            raise SystemExit(f"{args.data}: train and val hold different classes")
        return train, val, len(train.classes)
    from digits import load_data as load_digits

    def enlarge(data: TensorDataset) -> TensorDataset:
        images, labels = data.tensors
        images = F.interpolate(images, size=args.image_size, mode="bilinear").expand(-1, 3, -1, -1)
        return TensorDataset(images - images.mean(), labels)

    train, test = load_digits()
    return enlarge(train), enlarge(test), 10


def make_model(args: argparse.Namespace, num_classes: int) -> nn.Module:
    """Return the net that the flags ask for."""
    if args.pretrained:
        try:
            from torchvision import models  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError:
            raise SystemExit("--pretrained: torchvision is not installed") from None
        model = models.get_model(args.arch, weights="DEFAULT")
        if num_classes != 1000:
            raise SystemExit(f"--pretrained: these weights tell 1000 classes apart, the images are of {num_classes}")
        return model
    try:
        choice = choose(args.arch, "auto", args.scale, num_classes)
    except ValueError as error:
        raise SystemExit(f"--arch, --scale: {error}") from None
    if choice.vocab_size is not None:
        raise SystemExit(f"--arch: {args.arch} reads text")
    return choice.make()


def make_optimizer(args: argparse.Namespace, model: nn.Module, steps: int) -> torch.optim.Optimizer:
    """Return SGD, or the optimizer that belongs to the algorithm; it has a hundredth of SGD's learning rate."""
    exact, params = max(1, steps // 4), list(model.parameters())
    if args.algorithm == "qadam":
        return bagua.optim.QAdam(params, lr=args.lr / 100, warmup_steps=exact)
    if args.algorithm == "one_bit_lamb":
        return bagua.optim.OneBitLamb(params, lr=args.lr / 10, warmup_steps=exact)
    if args.algorithm == "zero_one_adam":
        return bagua.optim.ZeroOneAdam(params, lr=args.lr / 100, var_freeze_step=exact)
    return torch.optim.SGD(params, lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)


def rate(args: argparse.Namespace, steps_per_epoch: int) -> Callable[[int], float]:
    """Return the factor of the learning rate at each step."""
    marks = [args.epochs * share / 9 for share in (6, 7, 8)]
    if args.milestones is not None:
        marks = sorted(float(word) for word in args.milestones.split(","))
    warmup = max(1.0, args.warmup_epochs * steps_per_epoch)
    return lambda step: min(1.0, (step + 1) / warmup) * args.gama ** bisect_right(marks, step / steps_per_epoch)


@contextmanager
def one_model(model: nn.Module) -> Iterator[None]:
    """Within it all ranks hold the same weights and running statistics, and nothing runs in the background."""
    bagua.pause(model)
    bagua.average_parameters(model)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            torch.distributed.all_reduce(buffer)
            buffer /= torch.distributed.get_world_size()
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        bagua.resume(model)


def validate(args: argparse.Namespace, model: nn.Module, data: Split, device: torch.device) -> Scores:
    """Return the scores on all of `data`, each rank on its share. Collective."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    share = Subset(data, range(rank, len(data), size))  # pyright: ignore[reportArgumentType]
    totals = torch.zeros(4, dtype=torch.float64)
    with one_model(model):
        for images, labels in DataLoader(share, args.batch_size, num_workers=args.workers):
            logits = model(images.to(device)).float().cpu()
            guesses = logits.topk(min(TOP, logits.shape[1])).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, reduction="sum")
            totals += torch.stack([loss, guesses[:, 0].sum(), guesses.sum(), torch.tensor(len(labels))]).double()
    torch.distributed.all_reduce(totals)
    loss, top1, top5, count = totals.tolist()
    return Scores(loss / count, 100 * top1 / count, 100 * top5 / count)


class Training:
    """The steps of an epoch, and what they need."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, data: Split, device: torch.device) -> None:
        self.args, self.model, self.device = args, model, device
        self.sampler = DistributedSampler(data, seed=args.seed, drop_last=True)
        self.loader = DataLoader(
            data, args.batch_size, sampler=self.sampler, num_workers=args.workers, drop_last=True,
            pin_memory=device.type == "cuda", persistent_workers=args.workers > 0,
        )  # fmt: skip
        if len(self.loader) == 0:
            raise SystemExit(f"{len(self.sampler)} images of this rank do not make a batch of {args.batch_size}")
        self.optimizer = make_optimizer(args, model, args.epochs * len(self.loader))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate(args, len(self.loader)))
        self.scaler = bagua.GradScaler(device.type, enabled=args.amp and device.type == "cuda")

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**parts, "scaler": self.scaler}

    def epoch(self, number: int) -> None:
        """Train on every image once, but for those that do not fill a batch."""
        self.sampler.set_epoch(number)
        self.model.train()
        began, profiler = time.perf_counter(), None
        for step, (images, labels) in enumerate(self.loader, 1):
            if step == self.args.prof:
                profiler = torch.profiler.profile()
                profiler.start()
            logits, loss = self._step(images.to(self.device, non_blocking=True), labels.to(self.device))
            if step % self.args.print_freq == 0 or step == len(self.loader):
                right = (logits.argmax(1).cpu() == labels).float().mean().item()
                speed = step * len(labels) / (time.perf_counter() - began)
                say(f"epoch {number + 1}/{self.args.epochs}  step {step}/{len(self.loader)}  loss {loss.item():.4f}  "
                    f"right {right:.0%}  {speed:.0f} images/s per rank")  # fmt: skip
            if profiler is not None and step == self.args.prof + PROFILED - 1:
                profiler.stop()
                say(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))
                raise SystemExit(0)

    def _step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.float16 if self.device.type == "cuda" else torch.bfloat16
        with torch.autocast(self.device.type, dtype, enabled=self.args.amp):
            logits = self.model(images)
            loss = F.cross_entropy(logits.float(), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return logits.detach(), loss.detach()


def say(text: str) -> None:
    """Print on rank 0."""
    if torch.distributed.get_rank() == 0:
        print(text, flush=True)


def choose_device(no_cuda: bool) -> torch.device:
    """Return the device of this rank."""
    if no_cuda or not torch.cuda.is_available():
        torch.set_num_threads(1)  # one for each rank
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def main(argv: list[str] | None = None) -> Scores:
    """Train and validate epoch by epoch; returns the last scores."""
    args = build_parser().parse_args(argv)
    for name, (images, digits) in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, digits if args.data is None else images)
    device = choose_device(args.no_cuda)
    bagua.init_process_group()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(args.seed + rank)
    train, val, num_classes = load_data(args)
    model = make_model(args, num_classes).to(device)
    training = Training(args, model, train, device)
    options = {"sync_interval_ms": args.async_sync_interval} if args.algorithm == "async" else {}
    bagua.distribute(model, training.optimizer, args.algorithm, **options)
    count = sum(param.numel() for param in model.parameters())
    say(f"{args.arch} of {count:,} parameters on {size} x {device.type}; {len(train)} images, {num_classes} classes")  # pyright: ignore[reportArgumentType]

    first, best, scores = args.start_epoch, 0.0, Scores(math.nan, 0.0, 0.0)
    found = bagua.checkpoint.load(args.resume, training.state()) if args.resume is not None else None
    if found is not None:
        first, best = found.data["epoch"], found.data["best"]
        say(f"goes on after epoch {first}, from {found.path}")
    elif args.resume is not None:
        say(f"no checkpoint in {args.resume}; starts from nothing")
    for epoch in range(first, first if args.evaluate else args.epochs):
        training.epoch(epoch)
        scores = validate(args, model, val, device)
        best = max(best, scores.top1)
        say(f"epoch {epoch + 1}/{args.epochs}  {scores}  best {best:.2f} %")
        if args.save_checkpoint is not None:
            data = {"epoch": epoch + 1, "best": best}
            bagua.checkpoint.save(args.save_checkpoint, {**training.state(), **data}, step=epoch + 1, keep=2)
    if args.evaluate:
        scores = validate(args, model, val, device)
        say(
            f"validation: loss {scores.loss:.4f}  first guess right {scores.top1:.2f} %  among five {scores.top5:.2f} %"
        )
    stats = bagua.stats(model)
    if stats.steps:
        say(f"{stats.algorithm}: {stats.total.bytes_sent / stats.steps / 1e6:.3f} MB sent per step and rank, "
            f"compression {stats.total.compression_ratio:.2f}")  # fmt: skip
    bagua.destroy_process_group()
    return scores


if __name__ == "__main__":
    main(sys.argv[1:])

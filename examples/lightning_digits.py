"""Train the net of digits.py with Lightning, and Bagua as its strategy.

python examples/lightning_digits.py --strategy bagua --algorithm bytegrad --devices 2
bagua run --nproc-per-node 2 examples/lightning_digits.py --devices 2
python examples/lightning_digits.py --strategy ddp --devices 2                          Lightning's own, to compare

On several machines run one of the first two on each, with --num-nodes, and `bagua run`'s or Lightning's own environment
(MASTER_ADDR, MASTER_PORT, NODE_RANK). The data comes with scikit-learn; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from digits import DigitsNet, count, load_data, make_optimizer, make_options
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import bagua
from lightning_bagua import BaguaStrategy


class Digits(LightningModule):
    """The net with its loss and its optimizer."""

    def __init__(self, algorithm: str, lr: float | None, epochs: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = DigitsNet()
        self.algorithm, self.lr, self.epochs = algorithm, lr, epochs

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of images [B, 1, 8, 8] and labels [B]."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Count what is right."""
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("test_accuracy", right, sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self) -> Any:
        """Return the optimizer that goes with the algorithm, and a cosine schedule."""
        optimizer = make_optimizer(self.algorithm, self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]


class Report(Callback):
    """Keeps the statistics, which are gone once the module is a plain one again."""

    def __init__(self) -> None:
        self.stats: bagua.Stats | None = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take them."""
        if isinstance(trainer.strategy, BaguaStrategy):
            self.stats = bagua.stats(pl_module)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Handwritten digits with Lightning and Bagua.")
    names = [row.name for row in bagua.algorithms.available()]
    parser.add_argument("--strategy", choices=["bagua", "ddp"], default="bagua", help="%(default)s")
    parser.add_argument("--algorithm", choices=names, default="gradient_allreduce", metavar="NAME",
                        help=f"one of: {', '.join(names)} (default: %(default)s)")  # fmt: skip
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu or auto")
    parser.add_argument("--devices", type=count, default=2, help="processes on this machine")
    parser.add_argument("--num-nodes", type=count, default=1, help="machines (%(default)s)")
    parser.add_argument("--epochs", type=count, default=5, help="passes over the data (%(default)s)")
    parser.add_argument("--batch-size", type=count, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=None, help="default: 0.1 with SGD, 0.002 with the others")
    parser.add_argument("--precision", default="32-true", help="as of Lightning's Trainer: bf16-mixed, say")
    parser.add_argument("--accumulate", type=count, default=1, help="batches per step")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="save each epoch there, and go on from there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Train, and print on rank 0 how it went."""
    args = build_parser().parse_args(argv)
    strategy: Any = "ddp"
    if args.strategy == "bagua":
        strategy = BaguaStrategy(algorithm=args.algorithm, **make_options(args.algorithm))
    report = Report()
    callbacks: list[Callback] = [report]
    if args.checkpoints is not None:
        callbacks.append(ModelCheckpoint(args.checkpoints, save_last=True))
    trainer = Trainer(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        precision=args.precision,
        accumulate_grad_batches=args.accumulate,
        max_epochs=args.epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=args.checkpoints is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if trainer.strategy.root_device.type == "cpu":
        torch.set_num_threads(1)  # images this small are slower with more
    seed_everything(args.seed + int(os.environ.get("LOCAL_RANK", 0)), verbose=False)  # dropout differs by rank
    train, test = load_data()
    model = Digits(args.algorithm if args.strategy == "bagua" else "", args.lr, args.epochs)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True, drop_last=True)  # Lightning deals it out
    test_loader = DataLoader(test, batch_size=args.batch_size)

    started = time.perf_counter()
    resume = "last" if args.checkpoints is not None and args.checkpoints.exists() else None
    trainer.fit(model, loader, test_loader, ckpt_path=resume)
    seconds = time.perf_counter() - started
    (metrics,) = trainer.validate(model, test_loader, verbose=False)
    if trainer.is_global_zero:
        tell(args, trainer.world_size, seconds, metrics["test_accuracy"], report.stats)


def tell(args: argparse.Namespace, ranks: int, seconds: float, right: float, stats: bagua.Stats | None) -> None:
    """Print the results, and write them to a file if that is wanted."""
    name = args.algorithm if args.strategy == "bagua" else "torch DDP"
    print(f"{name} on {ranks} rank{'s' * (ranks > 1)}: {right:.2%} of the test images right, {seconds:.1f} s")
    result: dict[str, Any] = {"algorithm": name, "ranks": ranks, "seconds": seconds, "test_accuracy": right}
    if stats is not None:
        sent = stats.total.bytes_sent / max(stats.steps, 1) / 1e6
        print(f"{stats.steps} steps, {sent:.3f} MB sent per step and rank, "
              f"compression {stats.total.compression_ratio:.2f}")  # fmt: skip
        result |= {"mb_sent_per_step": sent, "compression_ratio": stats.total.compression_ratio, "steps": stats.steps}
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

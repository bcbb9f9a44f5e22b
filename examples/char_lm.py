"""Train a small transformer to continue text, character by character, data-parallel with Bagua.

python examples/char_lm.py                                            one process
bagua run --nproc-per-node 2 examples/char_lm.py --checkpoint out/char_lm

With gradient accumulation, bf16 autocast, clipping, a learning-rate schedule and checkpoints. Kill it whenever you
like: the same command goes on from the last checkpoint, and the losses are those of a run that was never killed.

The text (465,000 characters of the language reference) comes with Python; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bagua

VOCABULARY = 128  # ASCII


class Block(nn.Module):
    """Attention to what came before, and two linear layers."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [B, T, width]."""
        b, t, width = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.mixed(y.transpose(1, 2).reshape(b, t, width)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.before_mlp(x)), self.dropout, self.training)


class CharLM(nn.Module):
    """Predicts the next character. Embedding and output share their weights."""

    def __init__(self, width: int, layers: int, heads: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits [B, T, VOCABULARY] of characters [B, T]."""
        x = self.token(characters) + self.position[: characters.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.token.weight)


def load_text() -> Tensor:
    """Return the text as numbers; what is not ASCII becomes "?"."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode("ascii", "replace")))


def draw(text: Tensor, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
    """Return random pieces of `text`, and the same one character later; from torch's generator, which is saved."""
    starts = torch.randint(len(text) - context - 1, (batch_size,))
    pieces = text[starts[:, None] + torch.arange(context + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def make_optimizer(
    algorithm: str, model: nn.Module, lr: float, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return AdamW, or the optimizer that belongs to `algorithm`, and its schedule: up for a tenth, then down."""
    warmup = max(steps // 10, 1)
    exact = max(steps // 4, 1)  # steps in which momenta travel in full precision
    optimizer: torch.optim.Optimizer
    if algorithm == "qadam":
        optimizer = bagua.optim.QAdam(model.parameters(), lr=lr, warmup_steps=exact)
    elif algorithm == "one_bit_lamb":
        optimizer = bagua.optim.OneBitLamb(model.parameters(), lr=3 * lr, warmup_steps=exact)
    elif algorithm == "zero_one_adam":
        optimizer = bagua.optim.ZeroOneAdam(model.parameters(), lr=lr, var_freeze_step=exact)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)

    def scale(step: int) -> float:
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * min(step / steps, 1.0)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, args: argparse.Namespace, device: torch.device
) -> Tensor:
    """Make one step from several batches; return this rank's mean loss."""
    losses = []
    for number in range(args.accumulate):
        inputs, targets = (each.to(device) for each in draw(text, args.batch_size, args.context))
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.bf16):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / args.accumulate
        if number + 1 < args.accumulate:
            with bagua.no_sync(model):  # the last pass synchronises the sum
                loss.backward()
        else:
            loss.backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


def mean_over_ranks(loss: Tensor) -> float:
    """Return the mean of all ranks' losses."""
    total = loss.double()
    torch.distributed.all_reduce(total)
    return total.item() / torch.distributed.get_world_size()


def read_curve(path: Path | None, upto: int) -> dict[int, float]:
    """Return the losses by step that an earlier run has written, as far as its checkpoint goes."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {line["step"]: line["loss"] for line in lines if line["step"] <= upto}


def count(text: str) -> int:
    """Read a number of the command line that is 1 at least."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, not {text}")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="A character language model, data-parallel with Bagua.")
    names = [row.name for row in bagua.algorithms.available()]
    parser.add_argument("--algorithm", choices=names, default="bytegrad", metavar="NAME",
                        help=f"one of: {', '.join(names)} (default: %(default)s)")  # fmt: skip
    parser.add_argument("--steps", type=count, default=300, help="optimizer steps (%(default)s)")
    parser.add_argument("--batch-size", type=count, default=16, help="pieces of text per rank, batch and pass")
    parser.add_argument("--accumulate", type=count, default=2, help="backward passes for one step")
    parser.add_argument("--context", type=count, default=64, help="characters of a piece")
    parser.add_argument("--width", type=count, default=128, help="size of the embedding (%(default)s)")
    parser.add_argument("--layers", type=count, default=2, help="transformer layers (%(default)s)")
    parser.add_argument("--heads", type=count, default=4, help="attention heads (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (%(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="greatest norm of the gradient")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="compute in fp32")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu",
                        help="where to train (default here: %(default)s)")  # fmt: skip
    parser.add_argument("--checkpoint", type=Path, metavar="DIRECTORY", help="save there, and go on from there")
    parser.add_argument("--every", type=count, default=50, metavar="STEPS", help="between two checkpoints")
    parser.add_argument("--curve", type=Path, metavar="FILE", help="write the loss of each step there, as JSON lines")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Train, and print on rank 0 how it goes."""
    args = build_parser().parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # one for each rank
    bagua.init_process_group()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(args.seed)
    text = load_text()
    model = CharLM(args.width, args.layers, args.heads, args.context).to(device)
    optimizer, scheduler = make_optimizer(args.algorithm, model, args.lr, args.steps)
    bagua.distribute(model, optimizer, args.algorithm)
    torch.manual_seed(args.seed + 1000 * (rank + 1))  # every rank draws other pieces and drops other units

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    found = bagua.checkpoint.load(args.checkpoint, state) if args.checkpoint is not None else None
    done = found.step if found is not None else 0
    if rank == 0 and found is not None:
        print(f"goes on after step {done}, from {found.path}", flush=True)
    losses = read_curve(args.curve, done)
    curve = None
    if rank == 0 and args.curve is not None:
        args.curve.parent.mkdir(parents=True, exist_ok=True)
        curve = open(args.curve, "w")  # noqa: SIM115
        curve.writelines(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in losses.items())

    model.train()
    started = time.perf_counter()
    for step in range(done + 1, args.steps + 1):
        loss = mean_over_ranks(train_step(model, optimizer, text, args, device))
        scheduler.step()
        if curve is not None:
            print(json.dumps({"step": step, "loss": loss}), file=curve, flush=True)
        if rank == 0 and (step % 20 == 0 or step == args.steps):
            print(f"step {step}/{args.steps}  loss {loss:.4f}", flush=True)
        if args.checkpoint is not None and (step % args.every == 0 or step == args.steps):
            bagua.checkpoint.save(args.checkpoint, state, step=step, keep=2)
    if rank == 0 and args.steps > done:
        stats = bagua.stats(model)
        print(
            f"{stats.algorithm} on {size} rank{'s' * (size > 1)}: {args.steps - done} steps in "
            f"{time.perf_counter() - started:.1f} s, compression {stats.total.compression_ratio:.2f}"
        )
    if curve is not None:
        curve.close()
    bagua.destroy_process_group()


if __name__ == "__main__":
    main()

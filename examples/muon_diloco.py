"""Train a small transformer on bytes of source code, with Muon inside DiLoCo: less traffic than DDP, and a lower loss.

bagua run --nproc-per-node 4 examples/muon_diloco.py
bagua run --nproc-per-node 4 examples/muon_diloco.py --inner adamw --algorithm gradient_allreduce     as DDP with AdamW

Matrices of the blocks are trained by `torch.optim.Muon`, everything else by AdamW. Both are given to `distribute`, and
each rank steps alone. Every 8 steps the ranks exchange their weight changes in 4 bits. The text is Python's standard
library; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bagua

WIDTH, LAYERS, CONTEXT = 48, 2, 32
RATES = {"adamw": 4e-3, "muon": 0.02}


class Block(nn.Module):
    """Attention to what came before, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: [B, T, width]."""
        b, t, _ = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(b, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mixed(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.before_mlp(x))


class ByteGPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 256)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, 256] of bytes [B, T]."""
        return self.out(self.norm(self.blocks(self.token(tokens) + self.position)))


def make_optimizers(model: ByteGPT, inner: str) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters, or Muon for the matrices of the blocks and AdamW for the rest."""
    if inner == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=RATES["adamw"])]
    matrices = [param for param in model.blocks.parameters() if param.dim() == 2]
    held = {id(param) for param in matrices}
    rest = [param for param in model.parameters() if id(param) not in held]
    return [
        torch.optim.Muon(matrices, lr=RATES["muon"], weight_decay=0.01),
        torch.optim.AdamW(rest, lr=RATES["adamw"]),
    ]


def load_bytes() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on, and those of every tenth file."""
    parts = [file.read_bytes() for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    train, test = (b"".join(p for i, p in enumerate(parts) if (i % 10 == 9) is held) for held in (False, True))
    return torch.tensor(list(train)), torch.tensor(list(test))


def windows(text: Tensor, starts: Iterable[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Return pieces [B, T] of `text` and for each byte the one that follows."""
    rows = text[torch.as_tensor(starts)[:, None] + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, 1:]


def train(args: argparse.Namespace) -> tuple[float, float]:
    """Return the validation loss of the averaged weights, and the megabytes that this rank has sent before that."""
    rank = torch.distributed.get_rank()
    text, held_out = load_bytes()
    torch.manual_seed(args.seed)
    model = ByteGPT()
    optimizers = make_optimizers(model, args.inner)
    rates = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    options: dict[str, Any] = {}
    if args.algorithm == "diloco":
        options = {"communication_interval": args.interval, "codec": args.codec}
    bagua.distribute(model, optimizers, args.algorithm, **options)
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)
    for step in range(args.steps):
        grown = min(1.0, (step + 1) / (0.1 * args.steps))
        for group, rate in rates:
            group["lr"] = rate * grown * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        inputs, following = windows(text, torch.randint(len(text) - CONTEXT, (4,), generator=generator))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), following.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1}/{args.steps}  training loss {loss.item():.3f}", flush=True)
    sent = bagua.stats(model).total.bytes_sent / 1e6
    bagua.average_parameters(model)
    with torch.no_grad():
        inputs, following = windows(held_out, torch.linspace(0, len(held_out) - CONTEXT - 1, 512).long())
        return F.cross_entropy(model(inputs).flatten(0, 1), following.flatten()).item(), sent


def main(argv: list[str] | None = None) -> None:
    """Train, and print on rank 0 how it went."""
    parser = argparse.ArgumentParser(description="Muon inside DiLoCo, on bytes of source code.")
    parser.add_argument("--inner", choices=["muon", "adamw"], default="muon", help="default: %(default)s")
    parser.add_argument("--algorithm", choices=["diloco", "sparse_loco", "gradient_allreduce"], default="diloco",
                        help="default: %(default)s")  # fmt: skip
    parser.add_argument("--interval", type=int, default=8, help="steps between two rounds of diloco (%(default)s)")
    parser.add_argument("--codec", default="int4", help="of diloco's rounds (%(default)s)")
    parser.add_argument("--steps", type=int, default=640, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    bagua.init_process_group()
    loss, sent = train(args)
    if torch.distributed.get_rank() == 0:
        print(f"{args.algorithm} with {args.inner}: validation loss {loss:.3f}, {sent:.2f} MB sent by a rank")
    bagua.destroy_process_group()


if __name__ == "__main__":
    main()

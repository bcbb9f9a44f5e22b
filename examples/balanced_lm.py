"""Train a small language model on texts of very different lengths, with equal work for all ranks in every step.

python examples/balanced_lm.py                                                  one process
bagua run --nproc-per-node 4 examples/balanced_lm.py                            batches of a budget of tokens
bagua run --nproc-per-node 4 examples/balanced_lm.py --sampler plain            torch's DistributedSampler instead

The texts are the paragraphs of Python's own language reference, which ships with it; nothing is downloaded. Both
samplers make about the same number of steps per epoch, with the same samples per step on average.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import bagua
from bagua.data import TokenBudgetBatchSampler

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
PADDING = len(VOCABULARY)  # one more than the characters' numbers


def load_texts(longest: int = 1200) -> list[Tensor]:
    """Return each paragraph's characters as numbers; those of more than `longest` characters are cut into parts."""
    place = {character: number for number, character in enumerate(VOCABULARY)}
    paragraphs = dict.fromkeys(part for name in sorted(topics) for part in topics[name].split("\n\n"))
    coded = [torch.tensor([place[c] for c in text if c in place], dtype=torch.int64) for text in paragraphs]
    return [part for text in coded for part in text.split(longest) if len(part) > 1]


def collate(texts: list[Tensor]) -> Tensor:
    """Pad the texts of a batch to the longest: [B, T]."""
    return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PADDING)


class Layer(nn.Module):
    """Causal self-attention and a feed-forward net. Padding comes last, so nothing that counts attends to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        parts = self.inputs(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.output(mixed)
        return x + self.feed(self.norm2(x))


class LanguageModel(nn.Module):
    """A character-level transformer of two layers, 189,216 parameters with the default width."""

    def __init__(self, width: int = 64, longest: int = 1200) -> None:
        super().__init__()
        self.characters = nn.Embedding(PADDING + 1, width)
        self.positions = nn.Parameter(torch.randn(longest, width) * 0.02)
        self.layers = nn.Sequential(Layer(width, 2), Layer(width, 2))
        self.head = nn.Linear(width, len(VOCABULARY))

    def forward(self, texts: Tensor) -> Tensor:
        """[B, T] numbers to logits [B, T, 96] of the next character."""
        x = self.characters(texts) + self.positions[: texts.shape[1]]
        return self.head(self.layers(x))


def make_loader(kind: str, texts: list[Tensor], max_tokens: int, seed: int) -> tuple[DataLoader, object]:
    """Return a loader of this rank's batches, and what has `set_epoch`."""
    lengths = [len(text) for text in texts]
    balanced = TokenBudgetBatchSampler(lengths, max_tokens, seed=seed)
    if kind == "balanced":
        return DataLoader(texts, batch_sampler=balanced, collate_fn=collate), balanced  # pyright: ignore[reportArgumentType]
    sampler = DistributedSampler(texts, seed=seed)  # pyright: ignore[reportArgumentType]
    size = round(len(texts) / torch.distributed.get_world_size() / len(balanced))
    return DataLoader(texts, batch_size=size, sampler=sampler, collate_fn=collate), sampler  # pyright: ignore[reportArgumentType]


def imbalance(own: list[int]) -> tuple[float, int]:
    """Return the mean over steps of max over mean of the ranks' padded tokens, and all padded tokens."""
    table = [torch.empty(len(own)) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(table, torch.tensor(own, dtype=torch.float32))
    cost = torch.stack(table, dim=1)
    return (cost.amax(1) / cost.mean(1)).mean().item(), int(cost.sum())


def count(text: str) -> int:
    """Read a number of the command line that is 1 at least."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, not {text}")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="A small language model on texts of different lengths.")
    parser.add_argument("--sampler", choices=["balanced", "plain"], default="balanced",
                        help="balanced: batches of equal cost; plain: a DistributedSampler (%(default)s)")  # fmt: skip
    parser.add_argument("--max-tokens", type=count, default=6000, help="padded characters of a batch and rank")
    parser.add_argument("--epochs", type=count, default=2, help="passes over the texts (%(default)s)")
    parser.add_argument("--steps", type=count, help="at most so many in an epoch")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Train, and print on rank 0 how it goes."""
    args = build_parser().parse_args(argv)
    bagua.init_process_group()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    texts = load_texts()
    loader, sampler = make_loader(args.sampler, texts, args.max_tokens, args.seed)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model = bagua.distribute(model, optimizer)

    padded: list[int] = []
    tokens, seconds, loss = 0, 0.0, torch.tensor(0.0)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
        torch.distributed.barrier()
        begun = time.perf_counter()
        steps = len(loader) if args.steps is None else min(args.steps, len(loader))
        for step, batch in enumerate(islice(loader, steps), 1):
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PADDING)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            padded.append(batch.numel())
            tokens += int((batch != PADDING).sum())
            if rank == 0 and sys.stdout.isatty():
                print(f"\repoch {epoch + 1}/{args.epochs}  step {step}/{steps}", end="", flush=True)
        torch.distributed.barrier()
        seconds += time.perf_counter() - begun
        if rank == 0:
            start = "\r" if sys.stdout.isatty() else ""
            print(f"{start}epoch {epoch + 1}/{args.epochs}  {steps} steps  loss {loss.item():.3f}", flush=True)

    uneven, all_padded = imbalance(padded)
    total = torch.tensor([tokens])
    torch.distributed.all_reduce(total)
    result = {
        "sampler": args.sampler,
        "ranks": size,
        "steps": len(padded),
        "seconds": seconds,
        "tokens_per_s": total.item() / seconds,
        "padded_over_real": all_padded / total.item(),
        "max_over_mean": uneven,
        "loss": loss.item(),
    }
    if rank == 0:
        print(
            f"{args.sampler} on {size} ranks: {result['tokens_per_s']:.0f} characters per second; padded to "
            f"{result['padded_over_real']:.2f} of them; the busiest rank has {uneven:.2f} of the mean in a step"
        )
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result, indent=2) + "\n")
    bagua.destroy_process_group()


if __name__ == "__main__":
    main()

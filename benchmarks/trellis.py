"""Centroids for the trellises of `eden`, by a generalised Lloyd algorithm.

From random centroids, in turns: the best paths of blocks of normally distributed numbers, then for each window the mean
of the numbers that it stands for. The best of several starts is printed as `bagua/codecs/trellis_torch.py` has it, with
what it and the centroids in use leave of the variance, and with the least that any code of as many bits leaves,
4^-bits. Numbers for judging are others than those that the centroids were fitted to.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bagua.bench import progress, results_file
from bagua.bench.machine import now
from bagua.codecs.trellis_torch import SCALE, TRELLISES, Trellis, trellis_of

BLOCK = 256


def main(argv: list[str] | None = None) -> None:
    """Fit, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trellis", description=__doc__)
    parser.add_argument("--bits", type=int, default=1, metavar="B", help="of an element: 1 or 2 (1)")
    parser.add_argument("--states", type=int, default=8, metavar="S", help="a power of two from 8 on (8)")
    parser.add_argument("--starts", type=int, default=24, metavar="N", help="random centroids to begin with (24)")
    parser.add_argument("--rounds", type=int, default=80, metavar="N", help="of the algorithm (80)")
    parser.add_argument("--blocks", type=int, default=600, metavar="N", help=f"of {BLOCK} numbers, in a round (600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    args = parser.parse_args(argv)
    if args.states < 8 or args.states & (args.states - 1):
        parser.error(f"--states: expected a power of two from 8 on, got {args.states}")
    if args.bits not in (1, 2) or min(args.starts, args.rounds, args.blocks) < 1:
        parser.error("--bits is 1 or 2, --starts, --rounds and --blocks are positive")
    fits = list[tuple[float, Trellis]]()
    for start in range(args.starts):
        progress.show(f"start {start + 1} of {args.starts}")
        trellis = fitted(args.bits, args.states, args.rounds, args.blocks, start)
        fits.append((left(trellis, args.blocks, 2**31), trellis))
    progress.clear()
    share, best = min(fits, key=lambda fit: fit[0])
    print(f"{args.bits} bits, {args.states} states: leaves {share:.4f} of the variance, at least {4.0**-args.bits:.4f}")
    print(f"    {best.table}")
    used = trellis_of(args.bits, args.states) if (args.bits, args.states) in TRELLISES else None
    in_use = None if used is None else left(used, args.blocks, 2**31)
    if in_use is not None:
        print(f"those in use leave {in_use:.4f}")
    if args.json:
        options = {key: value for key, value in vars(args).items() if key != "json"}
        found: dict[str, Any] = {"left": share, "in_use": in_use, "starts": [each[0] for each in fits]}
        results_file.write(args.json, {"date": now(), "settings": options, **found, "table": best.table})


def fitted(bits: int, states: int, rounds: int, blocks: int, start: int) -> Trellis:
    """Centroids from a random start."""
    generator = torch.Generator().manual_seed(start)
    size = states << bits
    table_W = torch.special.ndtri((torch.arange(size, dtype=torch.float64) + 0.5) / size)
    table_W = table_W[torch.randperm(size, generator=generator)]
    for _ in range(rounds):
        trellis = rounded(bits, table_W)
        x_MN = torch.randn(blocks, BLOCK, generator=generator)
        window_I, x_I = trellis.windows(trellis.codes(x_MN * 4096)).flatten().long(), x_MN.flatten().double()
        sums_W = torch.zeros_like(table_W).index_add_(0, window_I, x_I)
        counts_W = torch.bincount(window_I, minlength=size)
        table_W = torch.where(counts_W > 0, sums_W / counts_W.clamp(min=1), table_W)
    return rounded(bits, table_W)


def rounded(bits: int, table_W: Tensor) -> Trellis:
    """As codecs hold it."""
    return Trellis(bits, tuple((table_W * SCALE).round().int().tolist()))


def left(trellis: Trellis, blocks: int, seed: int) -> float:
    """The mean squared error on numbers of variance 1."""
    x_MN = torch.randn(4 * blocks, BLOCK, generator=torch.Generator().manual_seed(seed))
    return (trellis.centroids(trellis.codes(x_MN * 4096)) - x_MN).square().mean().item()


if __name__ == "__main__":
    main()

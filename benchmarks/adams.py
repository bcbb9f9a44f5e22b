"""Milliseconds of a step of this package's Adams, beside torch's: `python -m benchmarks.adams --json out.json`.

Entrants take turns, with gradients that are given and not made; one thread. QAdam in its warm-up does what
`torch.optim.Adam(foreach=True)` does, with the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import bagua
from bagua.bench import machine

__all__ = ["ENTRANTS", "main"]

_Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

ENTRANTS: dict[str, _Make] = {
    "torch.optim.Adam(foreach=True)": lambda params: torch.optim.Adam(params, foreach=True),
    "torch.optim.Adam(fused=True)": lambda params: torch.optim.Adam(params, fused=True),
    "QAdam, warm-up": lambda params: bagua.optim.QAdam(params, warmup_steps=10**6),
    "QAdam": lambda params: bagua.optim.QAdam(params, warmup_steps=1),
    "OneBitLamb, warm-up": lambda params: bagua.optim.OneBitLamb(params, warmup_steps=10**6),
    "OneBitLamb": lambda params: bagua.optim.OneBitLamb(params, warmup_steps=1),
    "ZeroOneAdam": lambda params: bagua.optim.ZeroOneAdam(params, var_freeze_step=1),
}


def measure(elements: int, tensors: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each entrant's steps."""
    n = max(1, elements // tensors)
    grads = [torch.randn(n) for _ in range(min(tensors, 16))]
    found: dict[str, list[float]] = {name: [] for name in ENTRANTS}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, make in ENTRANTS.items():
        params = [nn.Parameter(torch.zeros(n)) for _ in range(tensors)]
        for index, param in enumerate(params):
            param.grad = grads[index % len(grads)]
        optimizers[name] = make(params)
    for step in range(rounds + 3):
        for name, optimizer in optimizers.items():
            started = time.perf_counter()
            optimizer.step()
            if step >= 3:  # the first ones make state, and end warm-ups
                found[name].append(1e3 * (time.perf_counter() - started))
        if sys.stderr.isatty():
            print(f"\rround {step + 1} of {rounds + 3}", end="", file=sys.stderr)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adams", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=int, default=25_000_000, help="of all tensors; default: 25 million")
    parser.add_argument("--tensors", type=int, default=16, help="of equal size; default: 16")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each; default: 15")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    args = parser.parse_args(argv)
    for name in ("elements", "tensors", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    torch.set_num_threads(1)
    found = measure(args.elements, args.tensors, args.rounds)
    medians = {name: statistics.median(times) for name, times in found.items()}
    first = medians[next(iter(ENTRANTS))]
    print(f"\n{'optimizer':32s} {'ms':>8s} {'of the first':>14s}")
    for name, ms in medians.items():
        print(f"{name:32s} {ms:8.1f} {ms / first:14.2f}")
    if args.json is not None:
        content = {"kind": "adams", "date": machine.now(), "machine": machine.describe_machine(), "ms": found}
        content["settings"] = {"elements": args.elements, "tensors": args.tensors, "rounds": args.rounds}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Milliseconds of a step of this package's Adams, beside torch's: `python -m benchmarks.adams --json out.json`.

Contenders take turns, with gradients that are given and not made; one thread. QAdam in its warm-up does what
`torch.optim.Adam(foreach=True)` does, with the same bits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

import bagua
from bagua.bench import machine, progress, results_file
from bagua.bench.layout import Columns
from bagua.bench.turns import turns

__all__ = ["CONTENDERS", "main"]

_Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

CONTENDERS: dict[str, _Make] = {
    "torch.optim.Adam(foreach=True)": lambda params: torch.optim.Adam(params, foreach=True),
    "torch.optim.Adam(fused=True)": lambda params: torch.optim.Adam(params, fused=True),
    "QAdam, warm-up": lambda params: bagua.optim.QAdam(params, warmup_steps=10**6),
    "QAdam": lambda params: bagua.optim.QAdam(params, warmup_steps=1),
    "OneBitLamb, warm-up": lambda params: bagua.optim.OneBitLamb(params, warmup_steps=10**6),
    "OneBitLamb": lambda params: bagua.optim.OneBitLamb(params, warmup_steps=1),
    "ZeroOneAdam": lambda params: bagua.optim.ZeroOneAdam(params, var_freeze_step=1),
}


def measure(elements: int, tensors: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each contender's steps."""
    n = max(1, elements // tensors)
    grads = [torch.randn(n) for _ in range(min(tensors, 16))]
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, make in CONTENDERS.items():
        params = [nn.Parameter(torch.zeros(n)) for _ in range(tensors)]
        for index, param in enumerate(params):
            param.grad = grads[index % len(grads)]
        optimizers[name] = make(params)

    def step_ms(optimizer: torch.optim.Optimizer) -> float:
        started = time.perf_counter()
        optimizer.step()
        return 1e3 * (time.perf_counter() - started)

    calls = {name: partial(step_ms, optimizer) for name, optimizer in optimizers.items()}
    # The first three steps make state, and end warm-ups.
    found = turns(calls, rounds, 3, lambda done, total: progress.show(f"round {done} of {total}"))
    progress.clear()
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
    first = medians[next(iter(CONTENDERS))]
    columns = Columns(("optimizer", -32), ("ms", 9), ("of the first", 15))
    print(columns.table([[name, f"{ms:.1f}", f"{ms / first:.2f}"] for name, ms in medians.items()]))
    if args.json is not None:
        content = {"kind": "adams", "date": machine.now(), "machine": machine.describe_machine(), "ms": found}
        content["settings"] = {"elements": args.elements, "tensors": args.tensors, "rounds": args.rounds}
        results_file.write(args.json, content)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

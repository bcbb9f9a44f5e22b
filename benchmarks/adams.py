"""Milliseconds of a step of this package's Adams, beside torch's: `python -m benchmarks.adams --json out.json`.

Contenders take turns, with gradients that are given and not made; one thread. QAdam in its warm-up does what
`torch.optim.Adam(foreach=True)` does, with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

import bagua
from bagua.bench import progress
from bagua.bench.turns import turns
from benchmarks.step_times import run

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
    return run("adams", (__doc__ or "").splitlines()[0], measure, 25_000_000, argv)


if __name__ == "__main__":
    raise SystemExit(main())

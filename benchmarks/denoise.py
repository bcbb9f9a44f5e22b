"""Milliseconds that `denoise_second_moments` adds to a step of AdamW: `python -m benchmarks.denoise --json out.json`.

Each round takes one step of `torch.optim.AdamW`, then the noise out of its second moments with each backend, on one
thread; gradients are given and not made. "torch" is what runs without compiled code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from bagua.algorithms.denoising import subtract_noise
from bagua.bench import progress
from bagua.bench.turns import turns
from bagua.codecs import available_backends, use_backend
from bagua.codecs.kernels import Moments
from benchmarks.step_times import run

__all__ = ["main"]

STEP = "torch.optim.AdamW"


def measure(elements: int, tensors: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of the optimizer's step, and of each backend."""
    size = max(1, elements // tensors)
    g_N, magnitude_N = torch.randn(size * tensors), torch.zeros(size * tensors)
    params = [nn.Parameter(torch.zeros(size)) for _ in range(tensors)]
    for param, part in zip(params, g_N.split(size), strict=True):
        param.grad = part
    optimizer = torch.optim.AdamW(params)
    optimizer.step()
    moments = [
        Moments(slot["exp_avg"], slot["exp_avg_sq"], part, decay_left=1e-3, floor=2.0)
        for slot, part in zip(map(optimizer.state.__getitem__, params), g_N.split(size), strict=True)
    ]

    def subtract(backend: str) -> None:
        with use_backend(backend):
            subtract_noise(g_N, magnitude_N, 0.59, moments)

    calls: dict[str, Callable[[], object]] = {STEP: optimizer.step}
    calls |= {backend: partial(subtract, backend) for backend in available_backends()}
    timed = {name: partial(_ms, call) for name, call in calls.items()}
    found = turns(timed, rounds, 2, lambda done, total: progress.show(f"round {done} of {total}"))
    progress.clear()
    return found


def _ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    return run("denoise", (__doc__ or "").splitlines()[0], measure, 10_000_000, argv)


if __name__ == "__main__":
    raise SystemExit(main())

"""Times steps of all contenders in turn, on equal parameters and gradients."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bagua.bench.turns import turns
from bagua.optim import NotElementwiseError, fuse
from benchmarks.fused.optimizers import IMPLEMENTATIONS, make
from benchmarks.fused.shapes import MODELS

__all__ = ["Contender", "measure", "ratios"]


class Contender:
    """One implementation of an optimizer with parameters of its own.

    Args:
        implementation: of torch: "for-loop", "foreach" or "fused".
        bagua: whether `bagua.optim.fuse` is applied to it.
    """

    def __init__(self, name: str, implementation: str, bagua: bool, shapes: Sequence[tuple[int, ...]], device: str):
        self.label = f"bagua on {implementation}" if bagua else implementation
        generator = torch.Generator().manual_seed(0)
        flat = torch.randn(sum(torch.Size(shape).numel() for shape in shapes), generator=generator) * 0.02
        parts = flat.split([torch.Size(shape).numel() for shape in shapes])
        self.params = [
            nn.Parameter(part.clone().view(shape).to(device)) for part, shape in zip(parts, shapes, strict=True)
        ]
        self.optimizer = make(name, implementation, self.params)
        self.refused = ""
        if bagua and self.optimizer is not None:
            try:
                fuse(self.optimizer)
            except NotElementwiseError as error:
                self.refused = str(error)

    def step_ms(self, grads: Sequence[Tensor]) -> float:
        """Step with fresh gradients, as after `zero_grad(set_to_none=True)`; milliseconds."""
        assert self.optimizer is not None
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.clone()
        _synchronize(self.params[0])
        begun = time.perf_counter()
        self.optimizer.step()
        _synchronize(self.params[0])
        taken_ms = (time.perf_counter() - begun) * 1e3
        self.optimizer.zero_grad(set_to_none=True)
        return taken_ms


def _synchronize(param: Tensor) -> None:
    if param.is_cuda:
        torch.cuda.synchronize(param.device)


def measure(
    models: Sequence[str], optimizers: Sequence[str], rounds: int, device: str, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each model and optimizer."""
    for model in models:
        shapes = MODELS[model]
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(shape, generator=generator).mul_(0.01).to(device) for shape in shapes]
        for name in optimizers:
            say(f"{model}, {name}")
            contenders = [
                contender
                for implementation in IMPLEMENTATIONS
                for bagua in (False, True)
                if (contender := Contender(name, implementation, bagua, shapes, device)).optimizer is not None
            ]
            running = [contender for contender in contenders if not contender.refused]
            times_ms = turns({each.label: partial(each.step_ms, grads) for each in running}, rounds, warmup=2)
            yield {
                "model": model,
                "parameters": len(shapes),
                "elements": sum(grad.numel() for grad in grads),
                "optimizer": name,
                "step_ms": {label: round(statistics.median(times), 3) for label, times in times_ms.items()},
                "spread": {label: round(max(times) / min(times), 2) for label, times in times_ms.items()},
                "refused": {contender.label: contender.refused for contender in contenders if contender.refused},
                "bit_identical": {
                    implementation: _equal(running, implementation)
                    for implementation in IMPLEMENTATIONS
                    if any(contender.label == f"bagua on {implementation}" for contender in running)
                },
            }
            del contenders, running
            gc.collect()


def _equal(contenders: Sequence[Contender], implementation: str) -> bool:
    plain, fused = (
        next(e for e in contenders if e.label == label) for label in (implementation, f"bagua on {implementation}")
    )
    return all(torch.equal(a, b) for a, b in zip(plain.params, fused.params, strict=True))


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """How many times as long each of torch's implementations takes as the fastest of Bagua's."""
    steps = row["step_ms"]
    best = min(value for label, value in steps.items() if label.startswith("bagua"))
    return {label: round(value / best, 2) for label, value in steps.items() if not label.startswith("bagua")}

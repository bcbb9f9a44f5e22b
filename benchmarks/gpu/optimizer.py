"""Part 5: fused optimizers on the device: the bits of torch's own, and the time of a step beside it."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import nn

from bagua.optim import fuse
from benchmarks.gpu.clock import pairs
from benchmarks.gpu.record import Record, Skip

__all__ = ["run"]

_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 1e-3},
    "AdamW": {"lr": 1e-3, "weight_decay": 0.01},
}
_IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def run(record: Record) -> None:
    """For each optimizer and implementation of torch: five steps of equal bits, then times in turn."""
    on_gpu = torch.cuda.is_available() and not record.dry
    device = torch.device("cuda" if on_gpu else "cpu")
    # Many small tensors, as of a transformer with its biases and norms; beside a few large ones.
    sizes = [(512,)] * 400 + [(512, 512)] * 40 if on_gpu else [(7,)] * 6 + [(5, 3)]
    record.facts.update(device=str(device), tensors=len(sizes))
    for name, options in _OPTIMIZERS.items():
        for implementation, choice in _IMPLEMENTATIONS.items():
            with record.check(f"{name}, {implementation}: same bits"):
                plain, fused = (_optimizer(name, {**options, **choice}, sizes, device) for _ in range(2))
                fuse(fused)
                for step in range(5):
                    _give_gradients(plain, fused, step)
                    plain.step()
                    fused.step()
                for a, b in zip(_params(plain), _params(fused), strict=True):
                    assert torch.equal(a, b), f"differs by {float((a - b).abs().max()):.3g}"
                measured = pairs(plain.step, fused.step, 15 if on_gpu else 2, 5 if on_gpu else 1, device)
                record.row(
                    optimizer=name,
                    implementation=implementation,
                    torch_us=round(statistics.median(a for a, _ in measured) * 1e6, 1),
                    fuse_us=round(statistics.median(b for _, b in measured) * 1e6, 1),
                    ratio=round(statistics.median(a / b for a, b in measured), 3),
                )


def _optimizer(name: str, options: dict[str, Any], sizes: Any, device: torch.device) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(size, generator=generator).to(device)) for size in sizes]
    try:
        return getattr(torch.optim, name)(params, **options)
    except RuntimeError as error:
        raise Skip(f"torch has none here: {error}") from error


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _give_gradients(plain: torch.optim.Optimizer, fused: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for a, b in zip(_params(plain), _params(fused), strict=True):
        a.grad = torch.randn(a.shape, generator=generator).to(a.device)
        b.grad = a.grad.clone()

"""Optimizers to step: torch's, and two as users write them, which have no `foreach` of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

__all__ = ["IMPLEMENTATIONS", "OPTIMIZERS", "BertAdam", "Lion", "make"]

Make = Callable[..., torch.optim.Optimizer]


class BertAdam(torch.optim.Optimizer):
    """Adam without bias correction, with a linear warm-up and decay added to the update, in a loop."""

    def __init__(self, params: Any, lr: float = 1e-4, warmup: int = 100) -> None:
        super().__init__(params, {"lr": lr, "warmup": warmup, "b1": 0.9, "b2": 0.999, "wd": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make one step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["next_m"], state["next_v"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["next_m"], state["next_v"]
                m.mul_(group["b1"]).add_(p.grad, alpha=1 - group["b1"])
                v.mul_(group["b2"]).addcmul_(p.grad, p.grad, value=1 - group["b2"])
                update = (m / (v.sqrt() + 1e-6)).add_(p, alpha=group["wd"])
                p.add_(update, alpha=-group["lr"] * min(1.0, (state["step"] + 1) / group["warmup"]))
                state["step"] += 1


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, in a loop. Source: arXiv 2302.06675."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "b1": 0.9, "b2": 0.99, "wd": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make one step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["wd"])
                p.add_(torch.lerp(p.grad, state["m"], group["b1"]).sign_(), alpha=-group["lr"])
                state["m"].lerp_(p.grad, 1 - group["b2"])


OPTIMIZERS: dict[str, Make] = {
    "SGD, momentum": partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=1e-4),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-4),
    "Adadelta": torch.optim.Adadelta,
    "BertAdam (hand-written)": BertAdam,
    "Lion (hand-written)": Lion,
}
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def make(name: str, implementation: str, params: Any) -> torch.optim.Optimizer | None:
    """The optimizer `name`; None if it has no such implementation."""
    builder = OPTIMIZERS[name]
    if builder in (BertAdam, Lion):
        return builder(params) if implementation == "for-loop" else None
    try:
        return builder(params, **IMPLEMENTATIONS[implementation])
    except TypeError:  # no such argument
        return None

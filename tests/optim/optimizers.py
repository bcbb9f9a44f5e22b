"""Optimizers as users write them, for tests: some act element by element, some do not."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Sign of an interpolated momentum. Source: arXiv 2302.06675."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), wd: float = 0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "wd": wd})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["wd"])
                p.add_((m * b1 + p.grad * (1 - b1)).sign_(), alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)
        return loss


class BertAdam(Optimizer):
    """Adam without bias correction, a warm-up by a step counted in Python, and decay added to the update.

    Args:
        clip: greatest norm of each parameter's gradient, as the original has it; None does not clip.
    """

    def __init__(self, params: Any, lr: float = 1e-3, warmup: int = 4, clip: float | None = None):
        super().__init__(params, {"lr": lr, "warmup": warmup, "clip": clip, "b1": 0.9, "b2": 0.999, "wd": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["next_m"], state["next_v"] = torch.zeros_like(p), torch.zeros_like(p)
                if group["clip"]:
                    torch.nn.utils.clip_grad_norm_(p, group["clip"])
                m, v = state["next_m"], state["next_v"]
                m.mul_(group["b1"]).add_(p.grad, alpha=1 - group["b1"])
                v.mul_(group["b2"]).addcmul_(p.grad, p.grad, value=1 - group["b2"])
                update = m / (v.sqrt() + 1e-6) + group["wd"] * p
                rate = group["lr"] * min(1.0, (state["step"] + 1) / group["warmup"])
                p.add_(update, alpha=-rate)
                state["step"] += 1
        return loss


class Replacing(Optimizer):
    """Momentum that puts new tensors in its state at each step, and remembers the last gradient itself."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    old = self.state[p]
                    m = 0.9 * old["m"] + p.grad if "m" in old else p.grad.clone()
                    self.state[p] = {"m": m, "seen": torch.tensor([1.0]) + old.get("seen", 0.0)}
                    p.sub_(group["lr"] * m)


class Lamb(Optimizer):
    """Adam's update scaled by a ratio of norms. Source: arXiv 1904.00962."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    def scale(self, p: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return p.norm().clamp(0, 10) / update.norm()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad.square(), 0.001)
                update = state["m"] / (state["v"].sqrt() + 1e-6)
                p.add_(update * self.scale(p, update), alpha=-group["lr"])


class Lars(Lamb):
    """Momentum scaled by a ratio of norms. Source: arXiv 1708.03888."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-8)), alpha=-group["lr"] * 1e-3)


class Shampoo(Lamb):
    """Preconditions with a matrix for each dimension. Source: arXiv 1802.09568."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad
                for dim, size in enumerate(p.shape):
                    factor = state.setdefault(f"factor_{dim}", torch.eye(size) * 1e-4)
                    rows = grad.transpose(0, dim).reshape(size, -1)
                    factor.add_(rows @ rows.T)
                    values, vectors = torch.linalg.eigh(factor)
                    root = vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T
                    grad = (root @ rows).reshape(grad.transpose(0, dim).shape).transpose(0, dim)
                p.add_(grad, alpha=-group["lr"])


class DecayOfMatrices(Lamb):
    """Decays matrices only: element-wise, but not regardless of shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.9 if p.ndim > 1 else 1.0).sub_(p.grad, alpha=group["lr"])


class Noisy(Lamb):
    """Adds noise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


class KnowsItsParams(Lamb):
    """Steps parameters that it remembers by itself: a trial must not touch the real ones."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, lr)
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p in self.mine:
            if p.grad is not None:
                p.sub_(p.grad)

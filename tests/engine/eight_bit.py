"""An optimizer whose momentum is a tensor subclass of 8-bit codes, as torchao's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SGD8", "Codes", "Flat", "momenta"]


class Codes(Tensor):
    """As torchao's 8-bit states: a tensor made of 8-bit codes and a scale, which computes by decoding."""

    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def decoded(self) -> Tensor:
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args
            source = source.decoded() if isinstance(source, Codes) else source
            target.scale.fill_(max(float(source.abs().max()) / 127, 1e-12))
            target.codes.copy_((source / target.scale).round())
            return target
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        args = [each.decoded() if isinstance(each, Codes) else each for each in args]
        return func(*args, **(kwargs or {}))


class Flat(Codes):
    """Can be taken apart."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Flat:
        return cls(parts["codes"], parts["scale"])


class SGD8(torch.optim.Optimizer):
    """Momentum in codes of `kind`."""

    def __init__(self, params: Any, kind: Callable[[Tensor, Tensor], Tensor], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if not self.state[param]:
                        codes = torch.zeros(param.shape, dtype=torch.int8)
                        self.state[param]["momentum"] = self.kind(codes, torch.ones(1))
                    moment = self.state[param]["momentum"]
                    moment.copy_(0.9 * moment + param.grad)
                    param.sub_(group["lr"] * (moment + 0))


def momenta(optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    return [
        [slot["momentum"].codes.clone(), slot["momentum"].scale.clone()] for slot in optimizer.state.values() if slot
    ]

"""Emulated compute: a model whose passes take a set time and no CPU, as on an accelerator.

Forward and backward sleep, layer by layer, until deadlines counted from the start of the pass, so that what hooks
cost in between does not add up. Gradients appear in the order and at the moments in which autograd would give them;
they are views of random numbers, at another place at each step.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bagua.bench.models import Layer, Model

__all__ = ["SPEED_FILE", "Compute", "EmulatedModel"]

SPEED_FILE = "BAGUA_LAB_SPEED_FILE"  # a file that holds a number: 0.5 is half as fast
_SLACK = 1 << 16  # elements by which the place of gradients moves about
_ALIGN = 16  # elements


@dataclass(frozen=True)
class Compute:
    """How long a step computes.

    Attributes:
        step_s: forward and backward together.
        forward_share: part of it that is forward.
    """

    step_s: float
    forward_share: float = 1 / 3

    def __post_init__(self) -> None:
        if not self.step_s >= 0:
            raise ValueError(f"step_s: expected a time >= 0, got {self.step_s!r}")
        if not 0 <= self.forward_share <= 1:
            raise ValueError(f"forward_share: expected a share in [0, 1], got {self.forward_share!r}")


class _Clock:
    """Deadlines of the pass in progress."""

    def __init__(self, compute: Compute, work: list[float]) -> None:
        self.compute = compute
        self.scale = 1.0  # below 1 while warming up
        done = list(accumulate(work))
        total = done[-1] or 1.0
        self._forward = [each / total for each in done]
        self._backward = [1 - each / total for each in [0.0, *done[:-1]]]
        self._started = 0.0
        self._pass_s = 0.0

    def begin(self, forward: bool) -> None:
        share = self.compute.forward_share
        self._pass_s = self.compute.step_s * (share if forward else 1 - share) * self.scale / read_speed()
        self._started = time.perf_counter()

    def wait(self, index: int, forward: bool) -> None:
        """Sleep until layer `index` has had its time."""
        done = (self._forward if forward else self._backward)[index]
        left = self._started + self._pass_s * done - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _EmulatedLayer, *params: Tensor) -> Tensor:
        ctx.layer = layer
        layer.clock.wait(layer.index, forward=True)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        layer: _EmulatedLayer = ctx.layer
        if layer.is_last:
            layer.clock.begin(forward=False)
        layer.clock.wait(layer.index, forward=False)
        return grad, None, *layer.gradients()


class _EmulatedLayer(nn.Module):
    """Parameters of one layer."""

    def __init__(self, layer: Layer, index: int, is_last: bool, clock: _Clock, pool_N: Tensor) -> None:
        super().__init__()
        self.index, self.is_last, self.clock = index, is_last, clock
        self.pool_N = pool_N  # not a buffer: never exchanged, no part of a state dict
        self.offset = index * 1009 * _ALIGN
        self.params = nn.ParameterList(nn.Parameter(self._view(torch.Size(shape)).clone()) for shape in layer.shapes)
        self._each = tuple(self.params)  # a ParameterList looks each of them up
        self._layouts = [(param.shape, param.stride()) for param in self._each]

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x, self, *self._each)

    def gradients(self) -> list[Tensor]:
        """Fresh views, so that autograd takes them over without a copy."""
        self.offset += 61 * _ALIGN
        start = self.offset % _SLACK // _ALIGN * _ALIGN
        return [self.pool_N.as_strided(shape, stride, start) for shape, stride in self._layouts]

    def _view(self, shape: torch.Size) -> Tensor:
        start = self.offset % _SLACK // _ALIGN * _ALIGN
        return self.pool_N[start : start + shape.numel()].view(shape)


class EmulatedModel(nn.Module):
    """The parameters of `model`; input and output are a tensor of one element.

    Args:
        model: layers and shapes.
        compute: how long a step takes; a host slowed through the file named by BAGUA_LAB_SPEED_FILE takes longer.
        seed: of the random numbers; give each rank another.
    """

    def __init__(self, model: Model, compute: Compute, seed: int = 0) -> None:
        super().__init__()
        self.clock = _Clock(compute, [layer.work for layer in model.layers])
        largest = max((torch.Size(shape).numel() for shape in model.shapes), default=0)
        generator = torch.Generator().manual_seed(seed)
        pool_N = torch.empty(largest + _SLACK).normal_(std=0.01, generator=generator)
        last = len(model.layers) - 1
        self.layers = nn.ModuleList(
            _EmulatedLayer(layer, index, index == last, self.clock, pool_N) for index, layer in enumerate(model.layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Take the time of a forward pass."""
        self.clock.begin(forward=True)
        for layer in self.layers:
            x = layer(x)
        return x


def read_speed() -> float:
    """The speed of this host; 1 unless BAGUA_LAB_SPEED_FILE names a file with another positive number."""
    name = os.environ.get(SPEED_FILE)
    if not name:
        return 1.0
    try:
        speed = float(Path(name).read_text())
    except (OSError, ValueError):
        return 1.0  # it is being written just now, or nobody slowed this host yet
    return speed if speed > 0 else 1.0

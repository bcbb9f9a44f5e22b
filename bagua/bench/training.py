"""The measured training step, and optimizers as an accelerator would run them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bagua
from bagua.bench.compute import EmulatedModel

__all__ = ["Parts", "Training", "close_nothing", "make_optimizer"]

LEARNING_RATE = 1e-3

#: Parameters, gradients and states, as `bagua.optim` steps them.
Batch = tuple[list[Tensor], list[Tensor], list[dict[str, Any]]]


class Parts(NamedTuple):
    """Seconds of one step: all of it, and three parts."""

    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float


def close_nothing() -> None:
    """For a training that leaves nothing behind."""


@dataclass
class Training:
    """A model made ready by one of the systems.

    Attributes:
        forward: one forward pass; returns the loss.
        backward: one backward pass of that loss.
        update: the optimizer's step.
        clear: of gradients.
        close: leaves the model plain; a collective.
    """

    forward: Callable[[], Tensor]
    update: Callable[[], object]
    clear: Callable[[], object]
    close: Callable[[], None] = close_nothing
    backward: Callable[[Tensor], object] = Tensor.backward

    @classmethod
    def of(cls, module: Any, optimizer: Any, close: Callable[[], None] = close_nothing) -> Training:
        """The usual loop."""
        x = torch.zeros(1)
        return cls(lambda: module(x).sum(), optimizer.step, optimizer.zero_grad, close)

    def step(self) -> Parts:
        """Make one training step."""
        started = time.perf_counter()
        loss = self.forward()
        forwarded = time.perf_counter()
        self.backward(loss)
        backed = time.perf_counter()
        self.update()
        updated = time.perf_counter()
        self.clear()
        ended = time.perf_counter()
        return Parts(ended - started, forwarded - started, backed - forwarded, updated - backed)


def _descend(group: dict[str, Any], batch: Batch) -> None:
    """The update of SGD in the place of an Adam's: on an accelerator they would hardly differ, on a CPU tenfold."""
    torch._foreach_add_(batch[0], batch[1], alpha=-float(group["lr"]))


class _QAdam(bagua.optim.QAdam):
    def _step_batch(self, group: dict[str, Any], batch: Batch, is_warm: bool) -> None:
        _descend(group, batch)


class _OneBitLamb(bagua.optim.OneBitLamb):
    def _step_lamb(self, group: dict[str, Any], batch: Batch) -> None:
        _descend(group, batch)


class _ZeroOneAdam(bagua.optim.ZeroOneAdam):
    def _step_batch(self, group: dict[str, Any], batch: Batch, kind: Any, size: float, drift: float) -> None:
        _descend(group, batch)


def make_optimizer(kind: str, model: EmulatedModel, emulated: bool = True) -> torch.optim.Optimizer:
    """Return "sgd", or the Adam that an algorithm needs, with a warm-up of two steps.

    Args:
        emulated: an Adam counts its steps and keeps its momentum, but does the arithmetic of SGD.
    """
    params = model.parameters()
    if kind == "sgd":
        return torch.optim.SGD(params, lr=LEARNING_RATE)
    if kind == "qadam":
        return (_QAdam if emulated else bagua.optim.QAdam)(params, lr=LEARNING_RATE, warmup_steps=2)
    if kind == "one_bit_lamb":
        return (_OneBitLamb if emulated else bagua.optim.OneBitLamb)(params, lr=LEARNING_RATE, warmup_steps=2)
    if kind == "zero_one_adam":
        made = _ZeroOneAdam if emulated else bagua.optim.ZeroOneAdam
        return made(params, lr=LEARNING_RATE, var_freeze_step=2, local_step_clipper=1)
    raise ValueError(f"optimizer {kind!r} is unknown")

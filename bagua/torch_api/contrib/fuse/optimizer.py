"""`fuse_optimizer` and `optimizer.fuse_step()` of the original, on `bagua.optim.fuse`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from bagua.optim.fused import NotElementwiseError, is_fused
from bagua.optim.fused.fuse import attach, check_can_fuse
from bagua.torch_api.report import report_once

__all__ = ["fuse_optimizer", "is_fused_optimizer"]

_O = TypeVar("_O", bound=torch.optim.Optimizer)


def fuse_optimizer(optimizer: _O, do_flatten: bool = True, check_flatten: bool = True) -> _O:
    """Give `optimizer` a method `fuse_step(closure=None)`, which steps on flat tensors; returns it.

    An optimizer that does not act element by element is left as it is, with the reason in the log; its `fuse_step`
    is its `step`.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        do_flatten: False moves no parameters: those that lie side by side are stepped together.
        check_flatten: False cannot act and is reported in the log: where things lie is looked at in every step.

    Raises:
        TypeError: not an optimizer.
        ValueError: its `step` was replaced.

    Differs: `step()` is fused too and gives the same numbers; the same object comes back; optimizers that are not
    element-wise, whose numbers the original changed, are not fused.
    """
    if not check_flatten:
        report_once("fuse_optimizer: check_flatten=False cannot act, where things lie is looked at in every step")
    if not is_fused(optimizer):
        try:
            check_can_fuse(optimizer)
            attach(optimizer, move=do_flatten)
        except NotElementwiseError as error:
            report_once(f"fuse_optimizer: {error}; fuse_step() is step()")
    ref = weakref.ref(optimizer)

    def fuse_step(closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; returns what `closure` returned."""
        alive = ref()
        if alive is None:
            raise RuntimeError("fuse_step: the optimizer no longer exists")
        return alive.step(closure)

    setattr(optimizer, "fuse_step", fuse_step)  # noqa: B010 - not an attribute that the class knows
    return optimizer


def is_fused_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `fuse_optimizer` was called on it."""
    return hasattr(optimizer, "fuse_step")

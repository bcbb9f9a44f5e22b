"""`fuse`: let an optimizer step on flat tensors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from bagua.optim.fused.layout import LimitsFor, limits_for
from bagua.optim.fused.proof import NotElementwiseError, find_difference
from bagua.optim.fused.stepper import Stepper
from bagua.optim.two_stage import TwoStage

__all__ = ["attach", "check_can_fuse", "fuse", "is_fused", "num_flat_groups", "own_step"]

_O = TypeVar("_O", bound=torch.optim.Optimizer)
_MARK = "_bagua_stepper"


def fuse(optimizer: _O, *, check: bool = True) -> _O:
    """Make `optimizer` step on a few flat tensors instead of thousands of small ones, and return it.

    Its class's own step runs, on parameters that stand for many, so the numbers are those of the unfused optimizer,
    bit for bit, with the implementation (`foreach`, `fused`, neither) that it was made with. `state`, `state_dict`,
    parameter groups, hooks and schedulers show nothing of it. Copies and pickles are plain optimizers.

    Small parameters are moved into common memory at the first step: their `data` is replaced, once. Where they or
    their gradients already lie in flat buckets, as `bagua.distribute` makes them, those are used and nothing is held
    twice.

    Args:
        optimizer: any whose step treats each element on its own, given the gradients; not one that needs a
            closure more than once.
        check: try that on small copies first.

    Raises:
        TypeError: not an optimizer.
        NotElementwiseError: (a ValueError) it does not act element by element; says what differed.
        ValueError: its `step` was replaced by somebody else, or is to be differentiated.

    Examples:
        >>> optimizer = bagua.optim.fuse(torch.optim.AdamW(model.parameters(), lr=1e-3))
        >>> model = bagua.distribute(model, optimizer, "bytegrad")
    """
    if is_fused(optimizer):
        return optimizer
    check_can_fuse(optimizer, trial=check)
    attach(optimizer)
    return optimizer


def check_can_fuse(optimizer: torch.optim.Optimizer, trial: bool = True) -> None:
    """Run the checks of `fuse` without changing anything."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    name = type(optimizer).__name__
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise ValueError(f"optimizer: the step of this {name} was replaced; fuse it before that")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(f"optimizer: {name} with differentiable=True cannot be fused")
    inner = [key for key, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)]
    if inner:
        raise ValueError(
            f"optimizer: {name} wraps another optimizer, its attribute {inner[0]!r}; fuse that one instead"
        )
    if isinstance(optimizer, TwoStage):  # not before its second stage, which a trial does not reach
        raise NotElementwiseError(f"optimizer: {name} cannot be fused: it bounds variances by their mean in a tensor")
    if trial:
        reason = find_difference(optimizer, attach, own_step(optimizer))
        if reason:
            raise NotElementwiseError(f"optimizer: {name} cannot be fused: {reason}")


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `fuse` was called on it."""
    return isinstance(optimizer, torch.optim.Optimizer) and _MARK in vars(optimizer)


def num_flat_groups(optimizer: torch.optim.Optimizer) -> int:
    """Number of parameter groups of which the last step took several parameters as one; 0 if it is not fused."""
    stepper: Stepper | None = vars(optimizer).get(_MARK)
    return 0 if stepper is None else len({arena.group for arena in stepper.arenas})


def attach(optimizer: torch.optim.Optimizer, limits: LimitsFor = limits_for, move: bool = True) -> Stepper:
    """Replace `optimizer.step` by the flat one."""
    stepper = Stepper(optimizer, limits, move)
    inner = own_step(optimizer)
    ref = weakref.ref(optimizer)  # a bound method would be a cycle, which keeps the tensors until it is collected

    def flat_step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kw: Any) -> Any:
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            return stepper.step(self, inner, (_Once(loss), *args), kw)
        return stepper.step(self, inner, args, kw)

    hooked = torch.optim.Optimizer.profile_hook_step(flat_step)

    @functools.wraps(inner)
    def step(*args: Any, **kwargs: Any) -> Any:
        self = ref()
        if self is None:
            raise RuntimeError(
                "step: the fused optimizer no longer exists; keep a reference to it, not only to its step"
            )
        setattr(self, "_opt_called", True)  # noqa: B010 - what a scheduler wants to know
        return hooked(self, *args, **kwargs)

    setattr(step, "_wrapped_by_lr_sched", True)  # noqa: B010 - a scheduler must not wrap it: it has no __func__
    vars(optimizer)["step"] = step
    vars(optimizer)[_MARK] = stepper
    return stepper


def own_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step of the optimizer's class, without the hooks that torch puts around it."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class _Once:
    """Stands for a closure that has been called already."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self._called = False

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        if self._called:
            raise RuntimeError("a fused optimizer cannot evaluate the closure several times in a step")
        self._called = True
        return self._loss

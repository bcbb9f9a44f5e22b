"""Steps of optimizers that are in progress: one within another, with a closure, or interrupted by an exception."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Arguments", "Nesting", "closure_in", "with_closure"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__  # what runs hooks around each step


class Nesting:
    """Steps of a module's optimizers that are in progress.

    An optimizer may step another one within its own step, and a class's `step` may call that of its base class; both
    are one step. After an exception torch calls no hook: whether a step still is in progress shows on the stack.
    """

    def __init__(self) -> None:
        self._depth = 0

    def enter(self) -> bool:
        """A step begins; returns whether no other is in progress."""
        if self._depth:
            self._depth = min(self._depth, _steps_on_stack() - 1)
        self._depth += 1
        return self._depth == 1

    def leave(self) -> bool:
        """A step is over; returns whether no other is in progress."""
        self._depth = max(0, self._depth - 1)
        return self._depth == 0

    @property
    def within(self) -> bool:
        """Asked from a hook before another step, whether one is in progress."""
        if self._depth:
            self._depth = min(self._depth, _steps_on_stack() - 1)
        return self._depth > 0

    @property
    def inside(self) -> bool:
        """Whether a step is in progress."""
        # A backward pass on a GPU runs in threads of its own, whose stacks show no step.
        if self._depth and torch._C._current_graph_task_id() == -1:
            self._depth = min(self._depth, _steps_on_stack())
        return self._depth > 0


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """The closure among the arguments of `step`, of which the first is the optimizer."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[..., Any], then: Callable[[Any], Any]
) -> Arguments:
    """The arguments of `step` with another closure: `then` gets what `closure` returns, and returns the loss."""

    @functools.wraps(closure)
    def evaluate(*more: Any, **options: Any) -> Any:
        return then(closure(*more, **options))

    if "closure" in kwargs:
        return args, {**kwargs, "closure": evaluate}
    return (args[0], evaluate, *args[2:]), kwargs


def _steps_on_stack() -> int:
    count, frame = 0, sys._getframe(1)
    while frame is not None:
        count += frame.f_code is _WRAPPER
        frame = frame.f_back
    return count

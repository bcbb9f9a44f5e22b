"""`fuse_optimizer` and `optimizer.fuse_step()` of the original, on `bagua.optim.fuse`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from bagua.optim.fused import NotElementwiseError, is_fused
from bagua.optim.fused.fuse import attach, check_can_fuse, num_flat_groups
from bagua.torch_api.report import report_once

__all__ = ["calculate_mutual_groups", "fuse_optimizer", "fuse_step", "is_fused_optimizer"]

_O = TypeVar("_O", bound=torch.optim.Optimizer)


def fuse_optimizer(optimizer: _O, do_flatten: bool = True, check_flatten: bool = True) -> _O:
    """Give `optimizer` a method `fuse_step(closure=None)`, which steps on flat tensors; returns it.

    An optimizer that does not act element by element is left as it is, with the reason in the log; its `fuse_step`
    is its `step`. As in the original, `optimizer._bagua_fused_count` counts the parameter groups that `fuse_step` took
    as flat tensors.

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
        report_once("fuse_optimizer: check_flatten=False has no effect: the memory layout is checked at every step")
    if not is_fused(optimizer):
        try:
            check_can_fuse(optimizer)
            attach(optimizer, move=do_flatten)
        except NotElementwiseError as error:
            report_once(f"fuse_optimizer: {error}; fuse_step() is step()")
    ref = weakref.ref(optimizer)

    def step_of_it(closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; returns what `closure` returned."""
        alive = ref()
        if alive is None:
            raise RuntimeError("fuse_step: the optimizer no longer exists")
        result = alive.step(closure)
        vars(alive)["_bagua_fused_count"] += num_flat_groups(alive)
        return result

    setattr(optimizer, "fuse_step", step_of_it)  # noqa: B010 - not an attribute that the class knows
    vars(optimizer).setdefault("_bagua_fused_count", 0)
    return optimizer


def fuse_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """`optimizer.fuse_step(closure)`.

    Raises:
        ValueError: `fuse_optimizer` was not called on it.
    """
    if not is_fused_optimizer(optimizer):
        raise ValueError("optimizer: call fuse_optimizer() on it first")
    return vars(optimizer)["fuse_step"](closure)


def calculate_mutual_groups(tensors_list: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Which tensors lie side by side in memory, in the same way in every list.

    Args:
        tensors_list: lists of equally many tensors, such as parameters, gradients and momenta.

    Returns:
        Positions of neighbours, in the order of memory: those of each run of two or more that is the same in all
        lists.

    Raises:
        ValueError: the lists differ in length.
    """
    if len({len(tensors) for tensors in tensors_list}) > 1:
        raise ValueError(
            f"tensors_list: expected lists of equal length, got {', '.join(str(len(each)) for each in tensors_list)}"
        )
    found = [_runs(tensors) for tensors in tensors_list]
    return [run for run in found[0] if all(run in others for others in found[1:])] if found else []


def _runs(tensors: Sequence[Tensor]) -> list[list[int]]:
    runs: list[list[int]] = []
    end: tuple[int, int, torch.dtype] | None = None
    for index in sorted(range(len(tensors)), key=lambda index: tensors[index].data_ptr()):
        tensor = tensors[index]
        storage, begin = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
        if end == (storage, begin, tensor.dtype):
            runs[-1].append(index)
        else:
            runs.append([index])
        end = storage, begin + tensor.numel() * tensor.element_size(), tensor.dtype
    return [run for run in runs if len(run) > 1]


def is_fused_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `fuse_optimizer` was called on it."""
    return hasattr(optimizer, "fuse_step")

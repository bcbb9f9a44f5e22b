"""An all-reduce that autograd knows."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.comm.primitives import all_reduce_
from bagua.torch_api.primitives import ReduceOp, op_name
from bagua.torch_api.process_group import (
    BaguaProcessGroup,
    CommMember,
    _get_default_group,
    communicator_of,
    from_torch_group,
)

__all__ = ["ReduceOp", "all_reduce", "torch_reduce_op_to_bagua"]

_OPS = ("sum", "avg", "max")
_made: weakref.WeakKeyDictionary[Any, BaguaProcessGroup] = weakref.WeakKeyDictionary()


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Tensor:
    """Return `tensor` reduced over `group`; in the backward pass its gradient is reduced with the same `op`.

    For the sum (and the mean) that is the derivative of the sum (mean) of all ranks' losses. For the maximum
    it is a convention, the original's and `torch.distributed.nn`'s, and not the derivative.

    Args:
        tensor: left as it is.
        op: SUM, AVG or MAX, of `torch.distributed.ReduceOp` or `bagua.torch_api.ReduceOp`.
        group: a `torch.distributed` group or a `BaguaProcessGroup`; None is all processes. A process that is
            no member gets `tensor` back.

    Raises:
        ValueError: another `op`, or one that the dtype does not know.
        TypeError: `tensor` is no tensor.
    """
    name = op_name(op)
    if name not in _OPS:
        raise ValueError(f"op: expected SUM, AVG or MAX, got {name.upper()}: its gradient is not an all-reduce")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor: expected a torch.Tensor, got {type(tensor).__name__}")
    comm = _communicator(group)
    return tensor if comm is CommMember.NON_COMM_MEMBER else _AllReduce.apply(tensor, name, comm)  # pyright: ignore


def torch_reduce_op_to_bagua(op: Any) -> ReduceOp:
    """Return the `ReduceOp` of this package for one of `torch.distributed`.

    Raises:
        ValueError: there is none.
    """
    return ReduceOp[op_name(op).upper()]


def _communicator(group: Any) -> Any:
    if group is None or group is dist.group.WORLD:
        return _get_default_group().get_global_communicator()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return CommMember.NON_COMM_MEMBER
    if not isinstance(group, BaguaProcessGroup):
        if group not in _made:
            _made[group] = from_torch_group(group)
        group = _made[group]
    return group.get_global_communicator()


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, op: str, comm: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.op, ctx.comm = op, comm
        result = tensor.clone(memory_format=torch.contiguous_format)
        communicator = communicator_of(comm)
        assert communicator is not None
        with communicator.on(result.device, "all_reduce") as members:
            all_reduce_(members, result, op)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _AllReduce.apply(grad, ctx.op, ctx.comm), None, None

"""Reductions of tensors over a `Group`, with equal semantics on all backends.

What a backend cannot do itself is done by moving the rows and folding them here: bitwise operations and int16
on NCCL, int16 on gloo, reduce-scatter on gloo (whose own runs a whole all-reduce). The mean of integers is
summed in 64 bits and rounded toward zero, so it is right where the sum would not fit the dtype.

Legend: R = ranks of the group, C = elements of one rank's part, N = elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.comm import collectives
from bagua.comm.arguments import as_bytes, check_multiple, check_numel, check_rank, check_tensors, flat
from bagua.comm.groups import Group

__all__ = [
    "OPS",
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced_",
    "reduce",
    "reduce_",
    "reduce_scatter",
    "reduce_scatter_",
]

_BITWISE = {"bor": torch.bitwise_or, "band": torch.bitwise_and, "bxor": torch.bitwise_xor}
OPS = ("sum", "product", "min", "max", *_BITWISE, "avg")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def reduce(group: Group, send_tensor: Tensor, recv_tensor: Tensor, dst: int, op: str = "sum") -> None:
    """Reduce `send_tensor` over the ranks into the `recv_tensor` of rank `dst`; other ranks' is unchanged.

    Raises:
        ValueError: sizes, dtypes or devices differ; `dst` is not a rank of the group; `op` is unknown or does
            not take this dtype.
    """
    check_tensors(send_tensor=send_tensor, recv_tensor=recv_tensor)
    check_rank(group, "dst", dst)
    _check_reduction("send_tensor", send_tensor, op)
    check_numel("recv_tensor", recv_tensor, send_tensor.numel(), "as many as send_tensor")
    with flat(send_tensor) as x_N, flat(recv_tensor, write=True) as out_N:
        _reduce(group, x_N, out_N, dst, op)


def reduce_(group: Group, tensor: Tensor, dst: int, op: str = "sum") -> None:
    """`reduce` with the result in the `tensor` of rank `dst`; elsewhere it stays as it was.

    Raises:
        ValueError: as `reduce`.
    """
    check_tensors(tensor=tensor)
    check_rank(group, "dst", dst)
    _check_reduction("tensor", tensor, op)
    with flat(tensor, write=True) as x_N:
        _reduce(group, x_N, x_N, dst, op)


def all_reduce(group: Group, send_tensor: Tensor, recv_tensor: Tensor, op: str = "sum") -> None:
    """All-reduce `send_tensor` into `recv_tensor`.

    Raises:
        ValueError: sizes, dtypes or devices differ; `op` is unknown or does not take this dtype.
    """
    check_tensors(send_tensor=send_tensor, recv_tensor=recv_tensor)
    _check_reduction("send_tensor", send_tensor, op)
    check_numel("recv_tensor", recv_tensor, send_tensor.numel(), "as many as send_tensor")
    with flat(send_tensor) as x_N, flat(recv_tensor, write=True) as out_N:
        out_N.copy_(x_N)
        _all_reduce(group, out_N, op)


def all_reduce_(group: Group, tensor: Tensor, op: str = "sum") -> None:
    """All-reduce `tensor`, in place.

    Raises:
        ValueError: `op` is unknown or does not take this dtype.
    """
    check_tensors(tensor=tensor)
    _check_reduction("tensor", tensor, op)
    with flat(tensor, write=True) as x_N:
        _all_reduce(group, x_N, op)


def all_reduce_coalesced_(group: Group, tensors: Sequence[Tensor], op: str = "sum") -> None:
    """`all_reduce_` each of `tensors`, with one message per dtype.

    Raises:
        ValueError: as `all_reduce_`, or the tensors are on several devices.
    """
    check_tensors(same_dtype=False, **{f"tensors[{i}]": tensor for i, tensor in enumerate(tensors)})
    for i, tensor in enumerate(tensors):
        _check_reduction(f"tensors[{i}]", tensor, op)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
        pack_N = torch.cat([tensor.contiguous().view(-1) for tensor in same])
        _all_reduce(group, pack_N, op)
        for tensor, part in zip(same, pack_N.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def reduce_scatter(group: Group, send_tensor: Tensor, recv_tensor: Tensor, op: str = "sum") -> None:
    """Reduce-scatter: the `recv_tensor` of rank r becomes the reduced part r of `send_tensor`.

    Shapes: R C and C elements.

    Raises:
        ValueError: sizes, dtypes or devices do not fit; `op` is unknown or does not take this dtype.
    """
    check_tensors(send_tensor=send_tensor, recv_tensor=recv_tensor)
    _check_reduction("send_tensor", send_tensor, op)
    check_numel("send_tensor", send_tensor, group.size * recv_tensor.numel(), "recv_tensor's times the ranks")
    with flat(send_tensor) as x_N, flat(recv_tensor, write=True) as out_C:
        _reduce_scatter(group, x_N.view(group.size, out_C.numel()), out_C, op)


def reduce_scatter_(group: Group, tensor: Tensor, op: str = "sum") -> None:
    """`reduce_scatter` with the result in the first part of `tensor`; the rest stays as it was.

    Shapes: R C elements.

    Raises:
        ValueError: the number of elements is not a multiple of R; `op` is unknown or does not take this dtype.
    """
    check_tensors(tensor=tensor)
    _check_reduction("tensor", tensor, op)
    check_multiple("tensor", tensor, group.size)
    with flat(tensor, write=True) as x_N:
        x_RC = x_N.view(group.size, x_N.numel() // group.size)
        _reduce_scatter(group, x_RC, x_RC[0], op)


def _check_reduction(name: str, tensor: Tensor, op: str) -> None:
    """Check that `op` is known and supports `tensor`'s dtype.

    Raises:
        ValueError: either.
    """
    if op not in OPS:
        raise ValueError(f"op: {op!r} is unknown; available: {', '.join(OPS)}")
    if tensor.dtype not in _INTEGERS and tensor.dtype not in _FLOATS:
        raise ValueError(f"{name}: {tensor.dtype} cannot be reduced; floating and integer dtypes can")
    if op in _BITWISE and tensor.dtype not in _INTEGERS:
        raise ValueError(f"op: {op!r} needs an integer dtype, but {name} is {tensor.dtype}")


def _all_reduce(group: Group, x_N: Tensor, op: str) -> None:
    """Reduce `x_N` over the group, in place on every rank.

    Bytes: 2 (R-1)/R times the size of `x_N` sent per rank; (R-1) times where the backend lacks the operation.
    """
    if group.size == 1 or not x_N.numel():
        return
    if op == "avg" and x_N.dtype in _INTEGERS:
        wide_N = x_N.to(torch.int64)
        collectives.all_reduce_(group, wide_N, "sum")
        x_N.copy_(wide_N.div_(group.size, rounding_mode="trunc"))
    elif _is_native(group, x_N.dtype, op):
        collectives.all_reduce_(group, x_N, op)
    else:
        rows_RN = x_N.new_empty(group.size, x_N.numel())
        rows_RN[group.rank].copy_(x_N)
        collectives.all_gather_rows(group, as_bytes(rows_RN))
        x_N.copy_(_fold(rows_RN, op))


def _reduce(group: Group, x_N: Tensor, out_N: Tensor, dst: int, op: str) -> None:
    """Reduce every rank's `x_N` into `out_N` of rank `dst`; `x_N` and, elsewhere, `out_N` stay as they were.

    `out_N` may be `x_N`.
    """
    if not x_N.numel():
        return
    integer_mean = op == "avg" and x_N.dtype in _INTEGERS
    if group.size > 1 and not integer_mean and not _is_native(group, x_N.dtype, op):
        scratch_N = x_N.clone()
        _all_reduce(group, scratch_N, op)
    else:
        # A backend may leave anything in the tensors of the other ranks, so none of the caller's goes in.
        scratch_N = x_N.to(torch.int64, copy=True) if integer_mean else x_N.clone()
        collectives.reduce_(group, scratch_N, dst, "sum" if integer_mean else op)
        if integer_mean:
            scratch_N.div_(group.size, rounding_mode="trunc")
    if group.rank == dst:
        out_N.copy_(scratch_N)


def _reduce_scatter(group: Group, x_RC: Tensor, out_C: Tensor, op: str) -> None:
    """Reduce part r of every rank's `x_RC` into `out_C` of rank r. `out_C` may lie within `x_RC`.

    Bytes: (R-1)/R times the size of `x_RC` sent per rank.
    """
    if not x_RC.numel():
        return
    integer_mean = op == "avg" and x_RC.dtype in _INTEGERS
    if group.size > 1 and group.backend != "gloo" and not integer_mean and _is_native(group, x_RC.dtype, op):
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp(collectives.REDUCE_OPS[op])
        result_C = torch.empty_like(out_C)
        group.wait(group.pg._reduce_scatter_base(result_C, x_RC.view(-1), options))
        wire = x_RC[0].numel() * x_RC.element_size() * (group.size - 1)
        group.meter.add(wire, wire)
        out_C.copy_(result_C)
        return
    rows_RC = torch.empty_like(x_RC)
    collectives.all_to_all_rows(group, as_bytes(rows_RC), as_bytes(x_RC))
    out_C.copy_(_fold(rows_RC, op))


def _is_native(group: Group, dtype: torch.dtype, op: str) -> bool:
    return dtype is not torch.int16 and not (op in _BITWISE and group.backend != "gloo")


def _fold(rows_RN: Tensor, op: str) -> Tensor:
    """Reduce over the rows, in rank order; as wide as the dtype, which integers may overflow but by "avg"."""
    if op == "sum":
        return rows_RN.sum(0, dtype=rows_RN.dtype)
    if op == "avg":
        if rows_RN.dtype in _FLOATS:
            return rows_RN.mean(0)
        return rows_RN.sum(0, dtype=torch.int64).div_(len(rows_RN), rounding_mode="trunc").to(rows_RN.dtype)
    if op == "product":
        return rows_RN.prod(0, dtype=rows_RN.dtype)
    if op == "min":
        return rows_RN.amin(0)
    if op == "max":
        return rows_RN.amax(0)
    total_N = rows_RN[0].clone()
    for row_N in rows_RN[1:]:
        _BITWISE[op](total_N, row_N, out=total_N)
    return total_N

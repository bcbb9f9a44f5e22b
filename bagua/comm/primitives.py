"""Communication primitives for scripts, over one `Group`.

Synchronous: on return CPU results are there, CUDA results are in order on the current stream. A trailing `_`
means in place. Ranks are ranks of the group. Tensors may have any shape and strides; what counts is their
elements in logical order. Moving data takes any dtype; reductions take floating and integer ones. Arguments
are checked on this
rank only: ranks that disagree about sizes fail or time out.

Legend: R = ranks of the group, C = elements of one rank's part, N = elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.comm import collectives
from bagua.comm.all_to_all import all_to_all, all_to_all_, all_to_all_v, all_to_all_v_
from bagua.comm.arguments import (
    as_bytes,
    check_count,
    check_multiple,
    check_numel,
    check_rank,
    check_tensors,
    flat,
)
from bagua.comm.groups import Group
from bagua.comm.reductions import (
    all_reduce,
    all_reduce_,
    all_reduce_coalesced_,
    reduce,
    reduce_,
    reduce_scatter,
    reduce_scatter_,
)

__all__ = [
    "all_gather",
    "all_gather_",
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced_",
    "all_to_all",
    "all_to_all_",
    "all_to_all_v",
    "all_to_all_v_",
    "barrier",
    "broadcast_",
    "broadcast_coalesced_",
    "gather",
    "gather_",
    "recv",
    "reduce",
    "reduce_",
    "reduce_scatter",
    "reduce_scatter_",
    "scatter",
    "scatter_",
    "send",
]


def send(group: Group, tensor: Tensor, dst: int) -> None:
    """Send `tensor` to rank `dst`, which must call `recv`. May block until then.

    Raises:
        ValueError: `dst` is not another rank of the group.
    """
    check_tensors(tensor=tensor)
    check_rank(group, "dst", dst, other=True)
    with flat(tensor) as x_N:
        if x_N.numel():
            group.pg.send([as_bytes(x_N)], dst, 0).wait()
            group.meter.add(x_N.numel() * x_N.element_size(), 0)


def recv(group: Group, tensor: Tensor, src: int) -> None:
    """Receive into `tensor` what rank `src` sends: as many elements of the same dtype.

    Raises:
        ValueError: `src` is not another rank of the group.
    """
    check_tensors(tensor=tensor)
    check_rank(group, "src", src, other=True)
    with flat(tensor, write=True) as x_N:
        if x_N.numel():
            group.pg.recv([as_bytes(x_N)], src, 0).wait()
            group.meter.add(0, x_N.numel() * x_N.element_size())


def broadcast_(group: Group, tensor: Tensor, src: int = 0) -> None:
    """Broadcast the `tensor` of rank `src`.

    Raises:
        ValueError: `src` is not a rank of the group.
    """
    broadcast_coalesced_(group, [tensor], src)


def broadcast_coalesced_(group: Group, tensors: Sequence[Tensor], src: int = 0) -> None:
    """Broadcast the `tensors` of rank `src` in one message; they may differ in dtype.

    Raises:
        ValueError: `src` is not a rank of the group, or the tensors are on several devices.
    """
    named = {f"tensors[{i}]" if len(tensors) > 1 else "tensor": tensor for i, tensor in enumerate(tensors)}
    check_tensors(same_dtype=False, **named)
    check_rank(group, "src", src)
    parts = [as_bytes(tensor.detach().contiguous().view(-1)) for tensor in tensors if tensor.numel()]
    if group.size == 1 or not parts:
        return
    alone = len(parts) == 1  # a lone tensor needs no packing
    wire = parts[0] if alone else torch.cat(parts)
    collectives.broadcast_(group, wire, src)
    if group.rank == src:
        return
    offset = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes and not (alone and tensor.is_contiguous()):
            # clone: a slice may start at an offset that the dtype's alignment forbids
            part = wire[offset : offset + nbytes].clone().view(tensor.dtype)
            tensor.detach().copy_(part.view(tensor.shape))
        offset += nbytes


def all_gather(group: Group, send_tensor: Tensor, recv_tensor: Tensor) -> None:
    """All-gather: part r of every rank's `recv_tensor` becomes the `send_tensor` of rank r.

    Shapes: C and R C elements.

    Raises:
        ValueError: sizes, dtypes or devices do not fit.
    """
    check_tensors(send_tensor=send_tensor, recv_tensor=recv_tensor)
    check_numel("recv_tensor", recv_tensor, group.size * send_tensor.numel(), "send_tensor's times the ranks")
    with flat(send_tensor) as x_C, flat(recv_tensor, write=True) as out_N:
        if out_N.numel():
            rows_RC = out_N.view(group.size, -1)
            rows_RC[group.rank].copy_(x_C)
            collectives.all_gather_rows(group, as_bytes(rows_RC))


def all_gather_(group: Group, tensor: Tensor) -> None:
    """All-gather in place: rank r contributes part r of its `tensor`.

    Shapes: R C elements.

    Raises:
        ValueError: the number of elements is not a multiple of R.
    """
    check_tensors(tensor=tensor)
    check_multiple("tensor", tensor, group.size)
    with flat(tensor, write=True) as x_N:
        if x_N.numel():
            collectives.all_gather_rows(group, as_bytes(x_N.view(group.size, -1)))


def gather(group: Group, send_tensor: Tensor, recv_tensor: Tensor, dst: int) -> None:
    """Gather: part r of rank `dst`'s `recv_tensor` becomes the `send_tensor` of rank r.

    Elsewhere `recv_tensor` stays as it was, but must have the size too.

    Shapes: C and R C elements, on all ranks.

    Raises:
        ValueError: sizes, dtypes or devices do not fit; `dst` is not a rank of the group.
    """
    check_tensors(send_tensor=send_tensor, recv_tensor=recv_tensor)
    check_rank(group, "dst", dst)
    check_numel("recv_tensor", recv_tensor, group.size * send_tensor.numel(), "send_tensor's times the ranks")
    with flat(send_tensor) as x_C, flat(recv_tensor, write=group.rank == dst) as out_N:
        _gather(group, x_C, out_N, dst)


def gather_(group: Group, tensor: Tensor, count: int, dst: int) -> None:
    """Put `count` elements of rank r's `tensor` into part r of rank `dst`'s, whose own part is in place.

    Shapes: at least R count elements on `dst`, count elsewhere.

    Raises:
        ValueError: `tensor` is too small; `count` is negative; `dst` is not a rank of the group.
    """
    check_tensors(tensor=tensor)
    at_root = group.rank == check_rank(group, "dst", dst)
    count = check_count("tensor", tensor, count, group.size if at_root else 1)
    with flat(tensor, write=at_root) as x_N:
        begin = group.rank * count if at_root else 0
        _gather(group, x_N[begin : begin + count], x_N[: group.size * count], dst)


def scatter(group: Group, send_tensor: Tensor, recv_tensor: Tensor, src: int) -> None:
    """Scatter: the `recv_tensor` of rank r becomes part r of rank `src`'s `send_tensor`.

    Shapes: R C and C elements, on all ranks, although `send_tensor` is read on `src` only.

    Raises:
        ValueError: sizes, dtypes or devices do not fit; `src` is not a rank of the group.
    """
    check_tensors(send_tensor=send_tensor, recv_tensor=recv_tensor)
    check_rank(group, "src", src)
    check_numel("send_tensor", send_tensor, group.size * recv_tensor.numel(), "recv_tensor's times the ranks")
    with flat(send_tensor) as x_N, flat(recv_tensor, write=True) as out_C:
        _scatter(group, x_N, out_C, src)


def scatter_(group: Group, tensor: Tensor, count: int, src: int) -> None:
    """Put part r of rank `src`'s `tensor` into the first `count` elements of rank r's; `src`'s stays.

    Shapes: at least R count elements on `src`, count elsewhere.

    Raises:
        ValueError: `tensor` is too small; `count` is negative; `src` is not a rank of the group.
    """
    check_tensors(tensor=tensor)
    at_root = group.rank == check_rank(group, "src", src)
    count = check_count("tensor", tensor, count, group.size if at_root else 1)
    with flat(tensor, write=not at_root) as x_N:
        out_C = x_N.new_empty(count) if at_root else x_N[:count]
        _scatter(group, x_N[: group.size * count], out_C, src)


def barrier(group: Group) -> None:
    """Barrier: return when all ranks have called it."""
    if group.size == 1:
        return
    options = dist.BarrierOptions()
    if group.backend != "gloo":
        options.device_ids = [torch.cuda.current_device()]
    group.pg.barrier(options).wait()


def _gather(group: Group, x_C: Tensor, out_N: Tensor, dst: int) -> None:
    """Rows of `out_N` on rank `dst` become each rank's `x_C`, which may be its own row there."""
    if not x_C.numel():
        return
    nbytes = x_C.numel() * x_C.element_size()
    at_root = group.rank == dst
    rows_RC = out_N.view(group.size, -1) if at_root else out_N
    if at_root:
        rows_RC[dst].copy_(x_C)
    if group.size == 1:
        return
    options = dist.GatherOptions()
    options.rootRank = dst
    targets = [list(as_bytes(rows_RC).unbind())] if at_root else []
    group.pg.gather(targets, [as_bytes(x_C)], options).wait()
    group.meter.add(0 if at_root else nbytes, nbytes * (group.size - 1) if at_root else 0)


def _scatter(group: Group, x_N: Tensor, out_C: Tensor, src: int) -> None:
    """`out_C` becomes this rank's row of `x_N` on rank `src`."""
    if not out_C.numel():
        return
    nbytes = out_C.numel() * out_C.element_size()
    at_root = group.rank == src
    if group.size == 1:
        out_C.copy_(x_N)
        return
    options = dist.ScatterOptions()
    options.rootRank = src
    sources = [list(as_bytes(x_N.view(group.size, -1)).unbind())] if at_root else []
    group.pg.scatter([as_bytes(out_C)], sources, options).wait()
    group.meter.add(nbytes * (group.size - 1) if at_root else 0, 0 if at_root else nbytes)

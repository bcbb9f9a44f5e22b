"""The communication primitives under the original's names.

All are synchronous: on return CPU tensors hold the result, and CUDA tensors hold it for whatever the current
stream does next. Ranks are those of `comm`, which is None for all processes; a process that holds
`CommMember.NON_COMM_MEMBER` returns at once. Tensors lie on the CPU (gloo) or on a GPU (NCCL). `op` is a
`ReduceOp`.

Raises:
    TypeError, ValueError: an argument is wrong; the message names it.
    RuntimeError: `torch.distributed` is not initialised.
    bagua.CommunicationError: the operation failed or timed out, or a peer has aborted the communicator. On the process
        that has aborted it operations return without effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.comm import objects, primitives
from bagua.errors import CommunicationError
from bagua.torch_api.process_group import Comm, communicator_of
from bagua.torch_api.report import report_once

__all__ = [
    "ReduceOp",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "gather",
    "gather_inplace",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]


class ReduceOp(IntEnum):
    """How to reduce. AVG of integers is the mean rounded toward zero; the bitwise ones need integers."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


def op_name(op: Any) -> str:
    """Return the core's name of a `ReduceOp` of this module or of `torch.distributed`.

    Raises:
        ValueError: neither.
    """
    if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        for known in ReduceOp:
            if op == getattr(dist.ReduceOp, known.name):
                return known.name.lower()
    elif isinstance(op, int) and not isinstance(op, bool) and op in list(ReduceOp):
        return ReduceOp(op).name.lower()
    raise ValueError(f"op: expected a ReduceOp, got {op!r}")


def _run(comm: Comm, what: str, tensor: Any, function: Any, *args: Any) -> None:
    """Call `function(group, *args)` with the group for tensors such as `tensor`, unless I am no member.

    Once this process has aborted the communicator nothing is done, which the log says once.
    """
    communicator = communicator_of(comm)
    if communicator is None:
        return
    device = tensor.device if isinstance(tensor, Tensor) else torch.device("cpu")
    try:
        with communicator.on(device, what) as group:
            function(group, *args)
    except CommunicationError:
        if not communicator.aborted:
            raise
        report_once(f"communicator {communicator.name} was aborted here: its operations do nothing and return")


def _first(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, Sequence) and len(tensors) else None


def send(tensor: Tensor, dst: int, comm: Comm = None) -> None:
    """Send `tensor` to `dst`, which calls `recv`. May block until it does."""
    _run(comm, "send", tensor, primitives.send, tensor, dst)


def recv(tensor: Tensor, src: int, comm: Comm = None) -> None:
    """Receive into `tensor` what `src` sends: as many elements of the same dtype."""
    _run(comm, "recv", tensor, primitives.recv, tensor, src)


def broadcast(tensor: Tensor, src: int = 0, comm: Comm = None) -> None:
    """Give everyone the `tensor` of `src`."""
    _run(comm, "broadcast", tensor, primitives.broadcast_, tensor, src)


def broadcast_coalesced(tensors: Sequence[Tensor], src: int = 0, comm: Comm = None) -> None:
    """Give everyone the `tensors` of `src`, in one message."""
    _run(comm, "broadcast_coalesced", _first(tensors), primitives.broadcast_coalesced_, tensors, src)


def reduce(send_tensor: Tensor, recv_tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, comm: Comm = None) -> None:
    """Reduce everyone's `send_tensor` into `dst`'s `recv_tensor`; elsewhere it stays as it was."""
    _run(comm, "reduce", send_tensor, primitives.reduce, send_tensor, recv_tensor, dst, op_name(op))


def reduce_inplace(tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, comm: Comm = None) -> None:
    """Reduce everyone's `tensor` into that of `dst`; elsewhere it stays as it was."""
    _run(comm, "reduce_inplace", tensor, primitives.reduce_, tensor, dst, op_name(op))


def allreduce(send_tensor: Tensor, recv_tensor: Tensor, op: Any = ReduceOp.SUM, comm: Comm = None) -> None:
    """All-reduce `send_tensor` into `recv_tensor`."""
    _run(comm, "allreduce", send_tensor, primitives.all_reduce, send_tensor, recv_tensor, op_name(op))


def allreduce_inplace(tensor: Tensor, op: Any = ReduceOp.SUM, comm: Comm = None) -> None:
    """Reduce `tensor` over all ranks."""
    _run(comm, "allreduce_inplace", tensor, primitives.all_reduce_, tensor, op_name(op))


def allreduce_coalesced_inplace(tensors: Sequence[Tensor], op: Any = ReduceOp.SUM, comm: Comm = None) -> None:
    """Reduce each of `tensors` over all ranks, in one message per dtype."""
    _run(
        comm,
        "allreduce_coalesced_inplace",
        _first(tensors),
        primitives.all_reduce_coalesced_,
        tensors,
        op_name(op),
    )


def allgather(send_tensor: Tensor, recv_tensor: Tensor, comm: Comm = None) -> None:
    """Put the `send_tensor` of rank r into part r of everyone's `recv_tensor`, n times as large."""
    _run(comm, "allgather", send_tensor, primitives.all_gather, send_tensor, recv_tensor)


def allgather_inplace(tensor: Tensor, comm: Comm = None) -> None:
    """Give everyone all n parts of `tensor`; rank r brings part r."""
    _run(comm, "allgather_inplace", tensor, primitives.all_gather_, tensor)


def gather(send_tensor: Tensor, recv_tensor: Tensor, dst: int, comm: Comm = None) -> None:
    """Put the `send_tensor` of rank r into part r of `dst`'s `recv_tensor`, n times as large on all ranks."""
    _run(comm, "gather", send_tensor, primitives.gather, send_tensor, recv_tensor, dst)


def gather_inplace(tensor: Tensor, count: int, dst: int, comm: Comm = None) -> None:
    """Put `count` elements of rank r into part r of `dst`'s `tensor`.

    `tensor` has n count elements on `dst`, whose own part is in place, and count elsewhere.
    """
    _run(comm, "gather_inplace", tensor, primitives.gather_, tensor, count, dst)


def scatter(send_tensor: Tensor, recv_tensor: Tensor, src: int, comm: Comm = None) -> None:
    """Put part r of `src`'s `send_tensor`, n times as large on all ranks, into rank r's `recv_tensor`."""
    _run(comm, "scatter", send_tensor, primitives.scatter, send_tensor, recv_tensor, src)


def scatter_inplace(tensor: Tensor, count: int, src: int, comm: Comm = None) -> None:
    """Put part r of `src`'s `tensor` into the first `count` elements of rank r's.

    `tensor` has n count elements on `src`, where it stays as it is, and count elsewhere.
    """
    _run(comm, "scatter_inplace", tensor, primitives.scatter_, tensor, count, src)


def reduce_scatter(send_tensor: Tensor, recv_tensor: Tensor, op: Any = ReduceOp.SUM, comm: Comm = None) -> None:
    """Reduce part r of everyone's `send_tensor`, n times as large, into the `recv_tensor` of rank r."""
    _run(comm, "reduce_scatter", send_tensor, primitives.reduce_scatter, send_tensor, recv_tensor, op_name(op))


def reduce_scatter_inplace(tensor: Tensor, op: Any = ReduceOp.SUM, comm: Comm = None) -> None:
    """Reduce part r of everyone's `tensor` into the first part of rank r's; the rest stays as it was."""
    _run(comm, "reduce_scatter_inplace", tensor, primitives.reduce_scatter_, tensor, op_name(op))


def alltoall(send_tensor: Tensor, recv_tensor: Tensor, comm: Comm = None) -> None:
    """Send part r of `send_tensor` to rank r; what rank r sends becomes part r of `recv_tensor`."""
    _run(comm, "alltoall", send_tensor, primitives.all_to_all, send_tensor, recv_tensor)


def alltoall_inplace(tensor: Tensor, comm: Comm = None) -> None:
    """`alltoall` of `tensor` into itself."""
    _run(comm, "alltoall_inplace", tensor, primitives.all_to_all_, tensor)


def alltoall_v(
    send_tensor: Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: Comm = None,
) -> None:
    """`alltoall` with parts of any size at any place: counts and first elements, one entry per rank.

    `recv_counts[r]` is what rank r has as `send_counts` for me. Entries beyond the number of ranks are
    ignored, and so is what lies between the parts.
    """
    args = (send_tensor, send_counts, send_displs, recv_tensor, recv_counts, recv_displs)
    _run(comm, "alltoall_v", send_tensor, primitives.all_to_all_v, *args)


def alltoall_v_inplace(tensor: Tensor, counts: Sequence[int], displs: Sequence[int], comm: Comm = None) -> None:
    """`alltoall_v` of `tensor` into itself: what rank r sends takes the place of what went to it."""
    _run(comm, "alltoall_v_inplace", tensor, primitives.all_to_all_v_, tensor, counts, displs)


def broadcast_object(obj: Any, src: int = 0, comm: Comm = None) -> Any:
    """Return `src`'s `obj` on every rank; None on a process that is no member.

    Differs: the original pickles. Here bytes from the network never run code, so `obj` is plain data: None,
    bool, int, float, complex, str, bytes, list, tuple, set, dict, torch tensors and numpy arrays, dtypes, devices,
    dates, times, namespaces, and named tuples and enumerations whose class every rank has imported, nested at
    will; anything else is a `TypeError` on all ranks.
    """
    communicator = communicator_of(comm)
    if communicator is None:
        return None
    with communicator.on(torch.device("cpu"), "broadcast_object") as group:
        return objects.broadcast_object(group, obj, src)


def barrier(comm: Comm = None) -> None:
    """Barrier: return when all ranks have called it."""
    communicator = communicator_of(comm)
    if communicator is not None and not communicator.aborted:
        communicator.barrier()

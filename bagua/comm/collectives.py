"""Collectives over a `Group`, each in the form that is fast on its backend.

On gloo the row exchanges are built from point-to-point transfers: every receive is posted first, then sends in
staggered order (peer rank + k in round k), then all are awaited. Waiting for one peer at a time deadlocks on a
ring, and one order for all floods the first peer. On NCCL the library's own collectives are used. If a group has
a mesh, sums of floating-point numbers and point-to-point transfers go over it, with the same results.

Legend: R = ranks of the group, W = bytes (or elements) of a row, N = elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from bagua.comm.groups import Group
from bagua.comm.mesh import SUMMED

__all__ = [
    "REDUCE_OPS",
    "all_gather_rows",
    "all_reduce_",
    "all_to_all_rows",
    "broadcast_",
    "reduce_",
    "sum_of_pieces_",
    "swap",
    "swap_tensors",
]

REDUCE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
    "avg": dist.ReduceOp.AVG,
}


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def all_reduce_(group: Group, x_N: Tensor, op: str = "sum") -> Tensor:
    """Reduce `x_N` over the group, in place, with the backend's own all-reduce.

    Bytes: 2 (R-1)/R times the size of `x_N` sent per rank (ring).
    """
    if group.size == 1:
        return x_N
    if group.mesh is not None and op == "sum" and x_N.dtype in SUMMED and x_N.is_contiguous():
        group.mesh.sum_(x_N)
    else:
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCE_OPS[op]
        group.wait(group.pg.allreduce([x_N], options))
    wire = 2 * _nbytes(x_N) * (group.size - 1) / group.size
    group.meter.add(wire, wire)
    return x_N


def sum_of_pieces_(group: Group, x_N: Tensor, pieces: Sequence[tuple[int, Tensor]], factor: float) -> None:
    """Sum over a group with a mesh into `x_N`. Summands lie elsewhere and count times `factor`; no pass is made for it.

    Args:
        x_N: fp32 on a CPU.
        pieces: of all of it: first element and elements, in order.
    """
    assert group.mesh is not None
    group.mesh.sum_(x_N, pieces, factor)
    wire = 2 * _nbytes(x_N) * (group.size - 1) / group.size
    group.meter.add(wire, wire)


def broadcast_(group: Group, x: Tensor, src: int = 0) -> Tensor:
    """Broadcast the `x` of rank `src` (a rank of the group), in place.

    Bytes: counted as one copy of `x` per receiver, sent by `src`; a backend's tree spreads the sends.
    """
    if group.size == 1:
        return x
    options = dist.BroadcastOptions()
    options.rootRank = src
    options.rootTensor = 0
    group.wait(group.pg.broadcast([x], options))
    if group.rank == src:
        group.meter.add(_nbytes(x) * (group.size - 1), 0)
    else:
        group.meter.add(0, _nbytes(x))
    return x


def reduce_(group: Group, x_N: Tensor, dst: int = 0, op: str = "sum") -> Tensor:
    """Reduce `x_N` to rank `dst`; on other ranks `x_N` is undefined afterwards.

    Bytes: counted as one copy of `x_N` from every rank but `dst`.
    """
    if group.size == 1:
        return x_N
    options = dist.ReduceOptions()
    options.reduceOp = REDUCE_OPS[op]
    options.rootRank = dst
    options.rootTensor = 0
    group.wait(group.pg.reduce([x_N], options))
    if group.rank == dst:
        group.meter.add(0, _nbytes(x_N) * (group.size - 1))
    else:
        group.meter.add(_nbytes(x_N), 0)
    return x_N


def all_to_all_rows(group: Group, out_RW: Tensor, rows_RW: Tensor) -> Tensor:
    """Send row r of `rows_RW` to rank r; `out_RW` row r becomes what rank r sent to this rank.

    Shapes: both [R, W], contiguous, same dtype; they must not overlap.
    Bytes: (R-1) rows sent per rank.
    """
    rank, size = group.rank, group.size
    if group.backend != "nccl" or size == 1:
        out_RW[rank].copy_(rows_RW[rank])
        if size > 1:
            _exchange(group, sends=rows_RW, receives=out_RW)
        return out_RW
    group.wait(group.pg.alltoall_base(out_RW, rows_RW, [], [], dist.AllToAllOptions()))
    wire = _nbytes(rows_RW) * (size - 1) / size
    group.meter.add(wire, wire)
    return out_RW


def all_gather_rows(group: Group, rows_RW: Tensor) -> Tensor:
    """All-gather rows; this rank's row `rows_RW[rank]` must already be in place.

    Shapes: [R, W], contiguous.
    Bytes: (R-1) rows sent per rank.
    """
    rank, size = group.rank, group.size
    if size == 1:
        return rows_RW
    if group.backend != "nccl":
        _exchange(group, sends=[rows_RW[rank]] * size, receives=rows_RW)
        return rows_RW
    group.wait(group.pg._allgather_base(rows_RW, rows_RW[rank : rank + 1]))
    wire = _nbytes(rows_RW[rank]) * (size - 1)
    group.meter.add(wire, wire)
    return rows_RW


def swap(group: Group, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
    """Send and receive the given (peer, tensor) pairs all at once.

    A peer may appear more than once; its transfers then match in the order given on either side.
    """
    if not sends and not receives:
        return  # NCCL returns no work for an empty batch
    if group.mesh is not None:
        group.mesh.swap(sends, receives)
        group.meter.add(sum(_nbytes(t) for _, t in sends), sum(_nbytes(t) for _, t in receives))
        return
    if group.backend == "nccl":
        group.pg._start_coalescing()
    works = [group.recv(tensor, peer, tag) for tag, (peer, tensor) in _tagged(receives)]
    works += [group.send(tensor, peer, tag) for tag, (peer, tensor) in _tagged(sends)]
    if group.backend == "nccl":
        works = [group.pg._end_coalescing()]
    for work in works:
        group.wait(work)
    group.meter.add(sum(_nbytes(t) for _, t in sends), sum(_nbytes(t) for _, t in receives))


def swap_tensors(group: Group, out_RW: Tensor, x_RW: Tensor) -> None:
    """On NCCL, two ranks: `out_RW` becomes the other rank's `x_RW`, in one call.

    Shapes: equal, contiguous.
    Bytes: those of `x_RW` sent per rank.
    """
    splits = [x_RW.shape[0] if peer != group.rank else 0 for peer in range(2)]
    group.wait(group.pg.alltoall_base(out_RW, x_RW, splits, splits, dist.AllToAllOptions()))
    group.meter.add(_nbytes(x_RW), _nbytes(x_RW))


def _tagged(pairs: Sequence[tuple[int, Tensor]]) -> list[tuple[int, tuple[int, Tensor]]]:
    """Number the transfers of each peer 0, 1, ..., so that both ends match them."""
    count: dict[int, int] = {}
    tagged = []
    for peer, tensor in pairs:
        tag = count.get(peer, 0)
        count[peer] = tag + 1
        tagged.append((tag, (peer, tensor)))
    return tagged


def _exchange(group: Group, sends: Sequence[Tensor] | Tensor, receives: Tensor) -> None:
    rank, size = group.rank, group.size
    swap(
        group,
        sends=[(peer, sends[peer]) for peer in ((rank + k) % size for k in range(1, size))],
        receives=[(peer, receives[peer]) for peer in ((rank - k) % size for k in range(1, size))],
    )

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
    "all_gather_shares",
    "all_reduce_",
    "all_to_all_rows",
    "broadcast_",
    "broadcast_over_hosts_",
    "reduce_",
    "reduce_over_hosts_",
    "reduce_shares_",
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

_PIECES, _PIECE_BYTES = 8, 64 * 2**10  # of a part: at most so many; smaller ones cost messages rather than bytes


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


def reduce_over_hosts_(group: Group, x_N: Tensor, scratch: Tensor) -> Tensor:
    """Sum `x_N` to rank 0; on other ranks `x_N` is undefined afterwards. For ranks on different hosts, over gloo.

    Ranks 1 to R-1 sum a part each and pass it on to rank 0, piece by piece. So rank 0 receives one `x_N` and not R-1,
    and of a sum and a broadcast no network card carries more than 2 - 1/(R-1) of it in one direction.

    Args:
        scratch: at least N + R elements of the same dtype. Its content is undefined afterwards.

    Bytes: one `x_N` sent by each rank but 0.
    """
    rank, parts, peers = group.rank, _parts(x_N, group.size - 1), _later_peers(group)
    sent: list[Any] = []
    if rank == 0:
        coming = dict(zip(peers, _parts(scratch[: x_N.numel()], len(peers)), strict=True))
        targets = dict(zip(peers, parts, strict=True))
    else:
        own = parts[rank - 1]
        sizes = [piece.numel() for piece in own]
        # A part has at most one element more than another one, so the copies of R-2 ranks fit.
        copies = scratch[: len(peers) * sum(sizes)].view(len(peers), sum(sizes))
        coming = {peer: copy.split(sizes) for peer, copy in zip(peers, copies, strict=True)}
        targets = dict.fromkeys(peers, own)
    works = {peer: _receive(group, pieces, peer) for peer, pieces in coming.items()}
    if rank > 0:
        for tag in range(_PIECES):
            sent += [group.send(parts[p - 1][tag], p, tag) for p in peers if tag < len(parts[p - 1])]
    for tag in range(_PIECES):
        for peer in peers:
            if tag < len(works[peer]):
                group.wait(works[peer][tag])
                targets[peer][tag].add_(coming[peer][tag])
        if rank > 0 and tag < len(parts[rank - 1]):
            sent.append(group.send(parts[rank - 1][tag], 0, tag))
    for work in sent:
        group.wait(work)
    received = sum(piece.numel() for pieces in coming.values() for piece in pieces) * x_N.element_size()
    group.meter.add(_nbytes(x_N) if rank > 0 else 0, received)
    return x_N


def broadcast_over_hosts_(group: Group, x_N: Tensor) -> Tensor:
    """Broadcast `x_N` of rank 0, in place. For ranks on different hosts, over gloo; see `reduce_over_hosts_`.

    Ranks 1 to R-1 get a part each from rank 0 and pass it on to each other, piece by piece.

    Bytes: one `x_N` sent by rank 0, (R-2)/(R-1) of it by each other rank.
    """
    rank, parts, peers = group.rank, _parts(x_N, group.size - 1), _later_peers(group)
    sent: list[Any] = []
    if rank == 0:
        for tag in range(_PIECES):
            sent += [group.send(parts[p - 1][tag], p, tag) for p in peers if tag < len(parts[p - 1])]
    else:
        own = _receive(group, parts[rank - 1], 0)
        works = [work for peer in peers for work in _receive(group, parts[peer - 1], peer)]
        for tag, work in enumerate(own):
            group.wait(work)
            sent += [group.send(parts[rank - 1][tag], peer, tag) for peer in peers]
        sent += works
    for work in sent:
        group.wait(work)
    passed = len(peers) * sum(_nbytes(piece) for piece in parts[rank - 1]) if rank > 0 else _nbytes(x_N)
    group.meter.add(passed, _nbytes(x_N) if rank > 0 else 0)
    return x_N


def reduce_shares_(group: Group, shares: Sequence[Tensor], scratch: Tensor) -> None:
    """Sum share r of all ranks on rank r, in place; on other ranks it is undefined afterwards.

    Args:
        shares: one for each rank, of the same lengths on all; some may be empty.
        scratch: at least R times the elements of this rank's share. Its content is undefined afterwards.

    Bytes: all shares but the own one sent per rank.
    """
    own, peers = shares[group.rank], [(group.rank + k) % group.size for k in range(1, group.size)]
    copies = scratch[: group.size * own.numel()].view(group.size, -1) if own.numel() else None
    received = [(peer, copies[peer]) for peer in reversed(peers)] if copies is not None else []
    swap(group, sends=[(peer, shares[peer]) for peer in peers if shares[peer].numel()], receives=received)
    if copies is None:
        return
    copies[group.rank].copy_(own)
    own.copy_(copies[0])
    for copy in copies[1:]:  # in the order of ranks, so that the same ranks give the same bits
        own.add_(copy)


def all_gather_shares(group: Group, shares: Sequence[Sequence[Tensor]]) -> None:
    """All-gather what differs in length: item r becomes what rank r has there.

    Args:
        shares: tensors for each rank, of the same lengths on all ranks; some may be empty.

    Bytes: this rank's tensors sent to each other rank.
    """
    peers = [(group.rank + k) % group.size for k in range(1, group.size)]
    swap(
        group,
        sends=[(peer, x) for peer in peers for x in shares[group.rank] if x.numel()],
        receives=[(peer, x) for peer in reversed(peers) for x in shares[peer] if x.numel()],
    )


def _parts(x_N: Tensor, count: int) -> list[Sequence[Tensor]]:
    """`count` parts of `x_N`, each in at most `_PIECES` pieces of at least `_PIECE_BYTES`, none of them empty."""
    least = max(1, _PIECE_BYTES // x_N.element_size())
    parts = x_N.tensor_split(count)
    return [part.split(max(least, -(-part.numel() // _PIECES))) if part.numel() else () for part in parts]


def _later_peers(group: Group) -> list[int]:
    """The other ranks from 1 on, beginning with the next one, so that not all send to the same one first."""
    return [peer for k in range(1, group.size) if (peer := (group.rank + k) % group.size)]


def _receive(group: Group, pieces: Sequence[Tensor], peer: int) -> list[Any]:
    return [group.recv(piece, peer, tag) for tag, piece in enumerate(pieces)]


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

"""A sum over all ranks in a ring of sends and receives, with the bits of gloo's all-reduce.

gloo's own posts a receive when it is needed, so that each hop takes several latencies, in which the lane idles.
Here all receives are posted first, so a hop takes one latency. Lanes share connections for sends, so one flow to the
next rank carries the sums of all of them and is seldom idle.

Legend: R = ranks of the group, N = elements, C = elements of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.comm.buffers import Buffers
from bagua.comm.collectives import all_gather_rows
from bagua.comm.groups import Group
from bagua.comm.pipelined import scatter_gather_rows

__all__ = ["ring_chunks", "ring_order", "sum_by_owners_", "sum_gathered_", "sum_in_ring_"]

_GLOO_SEGMENT = 1 << 20  # bytes; kMaxSegmentSize in gloo/allreduce.h
_TAG = 0


def ring_chunks(x_N: Tensor, size: int) -> list[Tensor]:
    """Cut `x_N` into the chunks of `size` ranks as gloo does; the last ones may be shorter or empty.

    Source: gloo/allreduce.cc: at least two segments a rank, of at most 1 MiB, as many for each rank.
    """
    n, width = x_N.numel(), x_N.element_size()
    segments = _divide_up(max(_divide_up(n * width, _GLOO_SEGMENT), 2 * size), size)
    c = segments * _divide_up(_divide_up(n * width, segments * size), width)
    return [x_N[min(r * c, n) : min((r + 1) * c, n)] for r in range(size)]


def ring_order(chunk: int, size: int) -> list[int]:
    """The ranks in the order in which a chunk is summed: from the rank before its owner down to the owner."""
    return [(chunk - k) % size for k in range(1, size + 1)]


def sum_in_ring_(group: Group, x_N: Tensor, buffers: Buffers) -> None:
    """Sum `x_N` over the group in place. Chunk c begins at rank c - 1, goes round to rank c, and then once more.

    Args:
        group: of gloo, at least two ranks.
        x_N: contiguous.
        buffers: of the lane; (R-1)/R of the size of `x_N` is kept there.

    Bytes: 2 (R-1)/R times the size of `x_N` sent per rank.
    """
    rank, size = group.rank, group.size
    to, source = (rank - 1) % size, (rank + 1) % size
    chunks, rounds = ring_chunks(x_N, size), 2 * (size - 1)
    sent = [chunks[(rank + 1 + k) % size] for k in range(rounds)]
    come = [chunks[(rank + 2 + k) % size] for k in range(rounds)]
    partial_RC = buffers.get("partial sums", (size - 1, chunks[0].numel()), x_N.dtype, x_N.device)
    # A sum may be received where a partial sum lies that this rank has sent: it exists only once that has arrived.
    targets = [partial_RC[k, : each.numel()] if k < size - 1 else each for k, each in enumerate(come)]
    receives = [group.recv(each, source, _TAG) if each.numel() else None for each in targets]
    sends = []
    for k in range(rounds):
        if sent[k].numel():
            sends.append(group.send(sent[k], to, _TAG))
        if receives[k] is not None:
            group.wait(receives[k])
            if k < size - 1:
                torch.add(come[k], targets[k], out=come[k])
    for work in sends:
        group.wait(work)
    wire = 2 * x_N.nbytes * (size - 1) / size  # on average over the ranks, as for gloo's
    group.meter.add(wire, wire)


def sum_by_owners_(group: Group, x_N: Tensor, buffers: Buffers) -> None:
    """As `sum_in_ring_`, with the same bits, in two latencies: chunks go straight to their owners, and sums back.

    Args:
        group: at least two ranks, of gloo or with a mesh.
        x_N: contiguous.
        buffers: of the lane.

    Bytes: 2 (R-1)/R times the size of `x_N` sent per rank.
    """
    rank, size = group.rank, group.size
    chunks = ring_chunks(x_N, size)
    mine_C = chunks[rank]
    rows_RC = buffers.get("summands", (size, mine_C.numel()), x_N.dtype, x_N.device)

    def combine() -> None:
        first, *others = ring_order(rank, size)
        for each in others[:-1]:
            rows_RC[first].add_(rows_RC[each])
        mine_C.add_(rows_RC[first])

    wire, peers_RW = [chunk.view(torch.uint8) for chunk in chunks], rows_RC.view(torch.uint8)
    scatter_gather_rows(group, wire, peers_RW, write=_nothing, combine=combine, read=_nothing)


def sum_gathered_(group: Group, x_N: Tensor, buffers: Buffers) -> None:
    """As `sum_in_ring_`, with the same bits, in one latency: each rank sends all others all it has, and sums itself.

    Args:
        group: at least two ranks, of gloo or with a mesh.
        x_N: contiguous.
        buffers: of the lane.

    Bytes: R-1 times the size of `x_N` sent per rank.
    """
    rank, size = group.rank, group.size
    rows_RN = buffers.get("summands", (size, x_N.numel()), x_N.dtype, x_N.device)
    rows_RN[rank].copy_(x_N)
    all_gather_rows(group, rows_RN)
    chunks = zip(*(ring_chunks(row_N, size) for row_N in rows_RN.unbind()), ring_chunks(x_N, size), strict=True)
    for owner, (*summands, sum_C) in enumerate(chunks):
        first, second, *others = (summands[each] for each in ring_order(owner, size))
        torch.add(first, second, out=sum_C)
        for each in others:
            sum_C.add_(each)


def _nothing(*_: object) -> None: ...


def _divide_up(a: int, by: int) -> int:
    return -(-a // by)

"""Pipelined all-to-all, reduction and all-gather: rows are sent as soon as written and read as they arrive.

Legend: R = ranks of the group, V = versions of a row, one of each rank, W = bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from bagua.comm.collectives import all_gather_rows, all_to_all_rows, swap_tensors
from bagua.comm.groups import Group

__all__ = ["scatter_gather_rows", "swap_rows"]

_SCATTER, _GATHER = 0, 1  # tags; transfers of one tag between two ranks match in order
Rows = Callable[[int, int, Any], object]


def scatter_gather_rows(
    group: Group,
    wire_RW: Tensor | Sequence[Tensor],
    peers_RW: Tensor,
    *,
    write: Rows,
    combine: Callable[[], object],
    read: Callable[[int, int], object],
    means_RW: Tensor | None = None,
) -> None:
    """Send row r of `wire_RW` to rank r, `combine` the received rows into one, and all-gather the results.

    On gloo every receive is posted before anything is sent: without a posted receive, a sender needs one
    more round trip. Sends go in staggered order (rank + 1 first), so that no rank is flooded. If the group has a mesh,
    rows go over it in the same order.

    Args:
        group: at least two ranks.
        wire_RW: rows to send.
        peers_RW: row r becomes what rank r sent to this rank, its own row included.
        write: `write(lo, hi, out)` writes rows lo to hi (what goes to ranks lo to hi - 1) into `out`.
        combine: called when `peers_RW` is complete; makes row `group.rank` of `means_RW`.
        read: `read(lo, hi)` is called when rows lo to hi of `means_RW` are there, in any order.
        means_RW: row r becomes what rank r's `combine` made. None: they take the place of the rows of `wire_RW`.

    Shapes: [R, W], rows contiguous; they must not overlap, and those of `means_RW` may have another length. On gloo
        `wire_RW` may be a list of R rows of different, even zero, lengths, without `means_RW`; rows of `peers_RW` are
        as long as this rank's own then.
    Bytes: R-1 rows of `wire_RW` and as many of `means_RW` sent per rank.
    """
    rank, size = group.rank, group.size
    made_RW = wire_RW if means_RW is None else means_RW
    if group.backend == "nccl":
        assert isinstance(wire_RW, Tensor)
        write(0, size, wire_RW)
        all_to_all_rows(group, peers_RW, wire_RW)
        combine()
        assert isinstance(made_RW, Tensor)
        all_gather_rows(group, made_RW)
        read(0, size)
        return
    if group.mesh is not None:
        peers = [peers_RW[peer] for peer in range(size)]
        rows = [wire_RW[peer] for peer in range(size)]

        def fill(row: int) -> None:
            write(row, row + 1, peers_RW[rank : rank + 1] if row == rank else wire_RW[row : row + 1])

        means = [made_RW[peer] for peer in range(size)]
        group.mesh.exchange(rows, peers, fill, combine, lambda row: read(row, row + 1), means=means)
        _count(group, rows, means)
        return
    mine = wire_RW[rank].numel() > 0
    later = [(rank + k) % size for k in range(1, size)]
    sources = later[::-1]  # rank - 1 sends to this rank first
    scattered = [group.recv(peers_RW[peer], peer, _SCATTER) for peer in sources if mine]
    # A row that a mean replaces is overwritten only after its owner has all of what it held before.
    filled = [peer for peer in sources if wire_RW[peer].numel()]
    gathered = [group.recv(made_RW[peer], peer, _GATHER) for peer in filled]
    sent = None
    for peer in later:
        if wire_RW[peer].numel():
            write(peer, peer + 1, wire_RW[peer : peer + 1])
            sent = _send_next(group, wire_RW[peer], peer, _SCATTER, sent)
    if mine:
        write(rank, rank + 1, peers_RW[rank : rank + 1])
        for work in scattered:
            group.wait(work)
        combine()
        for peer in later:
            sent = _send_next(group, made_RW[rank], peer, _GATHER, sent)
        read(rank, rank + 1)
    for work, peer in zip(gathered, filled, strict=True):
        group.wait(work)
        read(peer, peer + 1)
    if sent is not None:
        group.wait(sent)
    _count(group, wire_RW, made_RW)


def swap_rows(
    group: Group,
    versions_VRW: Tensor,
    *,
    write: Rows,
    read: Callable[[int], object],
) -> None:
    """Give each of two ranks both versions of both rows: the bytes of `scatter_gather_rows`, and half the latency.

    On gloo and a mesh the other rank's row goes first, so that transfers are those of `scatter_gather_rows` in order
    and length.

    Args:
        group: two ranks.
        versions_VRW: `versions_VRW[v, r]` becomes the version of row r that rank v has written.
        write: `write(lo, hi, out)` writes this rank's versions of rows lo to hi into `out`.
        read: `read(row)` is called when both versions of a row are there.

    Shapes: [2, 2, W], contiguous.
    Bytes: 2 rows sent per rank.
    """
    rank = group.rank
    other = 1 - rank
    mine_RW, theirs_RW = versions_VRW[rank], versions_VRW[other]
    if group.backend == "nccl":
        write(0, 2, mine_RW)
        swap_tensors(group, theirs_RW, mine_RW)
        read(0)
        read(1)
        return
    if group.mesh is not None:
        wire, peers = ([versions_VRW[v, r] for v in (0, 1)] for r in (other, rank))

        def fill(row: int) -> None:
            write(row, row + 1, mine_RW[row : row + 1])

        group.mesh.exchange(wire, peers, fill, _nothing, read, swapped=True)
        _count(group, mine_RW, mine_RW)
        return
    received = [group.recv(theirs_RW[row], other, tag) for row, tag in ((rank, _SCATTER), (other, _GATHER))]
    sent = None
    for row, tag in ((other, _SCATTER), (rank, _GATHER)):
        write(row, row + 1, mine_RW[row : row + 1])
        sent = _send_next(group, mine_RW[row], other, tag, sent)
    for work, row in zip(received, (rank, other), strict=True):
        group.wait(work)
        read(row)
    group.wait(sent)
    _count(group, mine_RW, mine_RW)


def _nothing() -> None:
    return None


def _count(group: Group, rows: Tensor | Sequence[Tensor], means: Tensor | Sequence[Tensor]) -> None:
    """Each other rank's row, and as many times this rank's mean."""
    others = group.size - 1
    scattered = [rows[rank].nbytes for rank in range(group.size)]
    sent = sum(scattered) - scattered[group.rank] + others * means[group.rank].nbytes
    gathered = sum(means[rank].nbytes for rank in range(group.size)) - means[group.rank].nbytes
    group.meter.add(sent, others * scattered[group.rank] + gathered)


def _send_next(group: Group, row: Tensor, peer: int, tag: int, previous: Any) -> Any:
    """Send behind `previous`: one at a time, so that each receiver has one sender at a time."""
    if previous is not None:
        group.wait(previous)
    return group.send(row, peer, tag)

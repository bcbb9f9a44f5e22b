"""All-to-all over a `Group`: equal parts, or parts of any size at any place.

Legend: R = ranks of the group, C = elements of one rank's part, N = elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.comm import collectives
from bagua.comm.arguments import as_bytes, check_multiple, check_numel, check_tensors, flat, overlap, spans
from bagua.comm.groups import Group

__all__ = ["all_to_all", "all_to_all_", "all_to_all_v", "all_to_all_v_"]


def all_to_all(group: Group, send_tensor: Tensor, recv_tensor: Tensor) -> None:
    """Send part r of `send_tensor` to rank r; part r of `recv_tensor` becomes what rank r sent to this rank.

    Shapes: R C elements both.

    Raises:
        ValueError: sizes, dtypes or devices do not fit.
    """
    check_tensors(send_tensor=send_tensor, recv_tensor=recv_tensor)
    check_multiple("send_tensor", send_tensor, group.size)
    check_numel("recv_tensor", recv_tensor, send_tensor.numel(), "as many as send_tensor")
    with flat(send_tensor) as x_N, flat(recv_tensor, write=True) as out_N:
        if x_N.numel():
            x_N = x_N.clone() if overlap(x_N, out_N) else x_N
            collectives.all_to_all_rows(group, as_bytes(out_N.view(group.size, -1)), as_bytes(x_N.view(group.size, -1)))


def all_to_all_(group: Group, tensor: Tensor) -> None:
    """`all_to_all` of `tensor` into itself.

    Raises:
        ValueError: the number of elements is not a multiple of R.
    """
    check_tensors(tensor=tensor)
    check_multiple("tensor", tensor, group.size)
    all_to_all(group, tensor, tensor)


def all_to_all_v(
    group: Group,
    send_tensor: Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
) -> None:
    """`all_to_all` with parts of any size at any place.

    To rank r go `send_counts[r]` elements from element `send_displs[r]` of `send_tensor` on; what rank r
    sends, `recv_counts[r]` elements, lands from element `recv_displs[r]` of `recv_tensor` on, the rest of
    which stays as it was. My `recv_counts[r]` must be rank r's `send_counts` for me. Entries beyond the
    group's size are ignored.

    Raises:
        TypeError: an entry is not an integer.
        ValueError: too few entries, or a part outside its tensor; dtypes or devices differ.
    """
    check_tensors(send_tensor=send_tensor, recv_tensor=recv_tensor)
    sends = spans(group, "send_", send_tensor, send_counts, send_displs)
    receives = spans(group, "recv_", recv_tensor, recv_counts, recv_displs)
    mine_in, mine_out = sends[group.rank], receives[group.rank]
    if mine_in[1] - mine_in[0] != mine_out[1] - mine_out[0]:
        raise ValueError(
            f"recv_counts[{group.rank}]: must equal send_counts[{group.rank}], the elements that this rank sends "
            "to itself"
        )
    with flat(send_tensor) as x_N, flat(recv_tensor, write=True) as out_N:
        x_N = x_N.clone() if overlap(x_N, out_N) else x_N
        _exchange_parts(group, [x_N[a:b] for a, b in sends], [out_N[a:b] for a, b in receives])


def all_to_all_v_(group: Group, tensor: Tensor, counts: Sequence[int], displs: Sequence[int]) -> None:
    """`all_to_all_v` of `tensor` into itself: what rank r sends takes the place of what went to it.

    Raises:
        TypeError, ValueError: as `all_to_all_v`.
    """
    check_tensors(tensor=tensor)
    parts = spans(group, "", tensor, counts, displs)
    with flat(tensor, write=True) as x_N:
        source_N = x_N.clone()
        _exchange_parts(group, [source_N[a:b] for a, b in parts], [x_N[a:b] for a, b in parts])


def _exchange_parts(group: Group, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
    """Send `sends[r]` to rank r, receive `receives[r]` from it; parts may be empty. They do not overlap."""
    rank, size = group.rank, group.size
    if group.backend != "nccl" or size == 1:
        receives[rank].copy_(sends[rank])
        to = [(rank + k) % size for k in range(1, size)]
        collectives.swap(
            group,
            sends=[(peer, as_bytes(sends[peer])) for peer in to if sends[peer].numel()],
            receives=[(peer, as_bytes(receives[peer])) for peer in reversed(to) if receives[peer].numel()],
        )
        return
    wire_in, wire_out = as_bytes(torch.cat([*sends])), as_bytes(torch.cat([*receives]))
    bytes_in = [part.numel() * part.element_size() for part in sends]
    bytes_out = [part.numel() * part.element_size() for part in receives]
    group.wait(group.pg.alltoall_base(wire_out, wire_in, bytes_out, bytes_in, dist.AllToAllOptions()))
    group.meter.add(sum(bytes_in) - bytes_in[rank], sum(bytes_out) - bytes_out[rank])
    for part, wire in zip(receives, wire_out.split(bytes_out), strict=True):
        part.copy_(wire.clone().view(part.dtype))  # clone: for the alignment of the dtype

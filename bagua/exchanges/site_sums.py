"""Sums over the hosts of a site whose addends are encoded on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bagua.codecs import Codec
from bagua.comm.buffers import Buffers
from bagua.comm.collectives import swap
from bagua.comm.groups import Group

__all__ = ["reduce_encoded_shares_"]


def reduce_encoded_shares_(group: Group, shares: Sequence[Tensor], codec: Codec, buffers: Buffers) -> None:
    """Sum share r of all ranks on rank r, in place; on other ranks it is undefined afterwards.

    The addends of the others are encoded, and summed in fp32 in the order of their ranks. The own one, which is exact,
    is added to that sum.

    Shapes: each share is [n], contiguous.

    Args:
        shares: one for each rank, of the same lengths on all; some may be empty.
        codec: of the addends.
        buffers: for scratch.

    Bytes: all shares but the own one, encoded, sent per rank.
    """
    own, others = shares[group.rank], group.size - 1
    peers = [(group.rank + k) % group.size for k in range(1, group.size)]
    widths = [codec.wire_bytes(share.numel()) if share.numel() else 0 for share in shares]
    sent = sum(widths) - widths[group.rank]
    flat = buffers.get("site", (sent + others * widths[group.rank],), torch.uint8, own.device)
    sends = list[tuple[int, Tensor]]()
    for peer, part in zip(peers, flat[:sent].split([widths[peer] for peer in peers]), strict=True):
        if shares[peer].numel():
            codec.encode(shares[peer].view(1, -1), out=part.view(1, -1))
            sends.append((peer, part))
    versions_RW = flat[sent:].view(others, widths[group.rank])
    places = {peer: peer - (peer > group.rank) for peer in peers}
    receives = [(peer, versions_RW[places[peer]]) for peer in reversed(peers)] if own.numel() else []
    swap(group, sends=sends, receives=receives)
    if own.numel():
        sum_N = buffers.get("site sum", (own.numel(),), torch.float32, own.device)
        own.add_(codec.decode_mean(versions_RW, own.numel(), sum_N, 1.0))

"""All-gather of encoded tensors: mean or sum over all ranks with codecs that send little of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bagua.codecs import Codec
from bagua.comm.collectives import all_gather_rows
from bagua.comm.groups import Groups
from bagua.exchanges.base import Exchange, State, check_codec

__all__ = ["AllGather"]


@dataclass(frozen=True)
class AllGather(Exchange):
    """x = mean over ranks r of Q(x_r), Q = decode(encode(.)): each rank sends its encoded tensor to all others.

    Every rank decodes the same rows in the same order, so all get the same bits. What is sent is encoded once:
    `ScatterGather` encodes the mean again with more than two ranks, which for a sparse codec drops most of what one
    rank has sent. In exchange the bytes grow with the number of ranks; for codecs with more than about one bit per
    element `ScatterGather` sends less.

    Args:
        codec: any that is lossy.
        average: mean if true, else sum.

    Bytes: (R-1) encoded tensors sent per rank.
    Source: arXiv:2508.15706 (SparseLoCo), algorithm 1: all-gather of sparse pseudo-gradients.

    Examples:
        >>> exchange = bagua.exchanges.AllGather(bagua.codecs.PackedTopK())
    """

    codec: Codec
    average: bool = True

    def __post_init__(self) -> None:
        check_codec("AllGather", self.codec)
        if self.codec.lossless:
            raise ValueError(f"AllGather with codec {self.codec.name!r}: AllReduce sends less and gives the same")

    @property
    def name(self) -> str:
        """all_gather, with the codec."""
        return f"all_gather[{self.codec.name}]"

    @property
    def lossy(self) -> bool:
        """True."""
        return True

    def run(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        """Shapes: x_N is [N], any N >= 0."""
        group, n = groups.world, x_N.numel()
        if group.size == 1 or n == 0:
            return
        width = self.codec.wire_bytes(n, x_N.dtype)
        wire_RW = groups.buffers.get("wire", (group.size, width), torch.uint8, x_N.device)
        self.codec.encode(x_N.view(1, n), out=wire_RW[group.rank : group.rank + 1])
        all_gather_rows(group, wire_RW)
        self.codec.decode_mean(wire_RW, n, x_N, 1.0 / group.size if self.average else 1.0)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """(R-1) encoded tensors."""
        return (size - 1) * self.codec.wire_bytes(n, torch.float32)

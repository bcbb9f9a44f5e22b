"""The mean or sum of all ranks, summed on the way by the backend."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bagua.codecs import Codec, Identity
from bagua.comm.collectives import all_reduce_
from bagua.comm.groups import Groups
from bagua.exchanges.base import Exchange, State

__all__ = ["AllReduce"]


@dataclass(frozen=True)
class AllReduce(Exchange):
    """x = mean (or sum) over all ranks.

    The mean is taken by dividing before the sum, as `DistributedDataParallel` does: fp16 does not overflow, and
    equal layouts give equal bits.

    Args:
        codec: identity, or a linear codec (bf16, fp16), in which case the sum is taken in that type.
        average: mean if true, else sum.

    Bytes: 2 (R-1)/R times the encoded size, sent per rank.
    """

    codec: Codec = field(default_factory=Identity)
    average: bool = True

    def __post_init__(self) -> None:
        if not self.codec.linear:
            raise ValueError(f"AllReduce cannot sum codec {self.codec.name!r} on the wire; use ScatterGather")

    @property
    def name(self) -> str:
        """all_reduce, with the codec unless it is the identity."""
        return "all_reduce" if self.codec.lossless else f"all_reduce[{self.codec.name}]"

    @property
    def lossy(self) -> bool:
        """Unless the codec is the identity."""
        return not self.codec.lossless

    def run(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        """Shapes: x_N is [N], any N."""
        group = groups.world
        if group.size == 1:
            return
        if self.average:
            x_N.mul_(1.0 / group.size)
        if self.codec.lossless:
            all_reduce_(group, x_N)
            return
        n = x_N.numel()
        wire = groups.buffers.get("wire", (1, self.codec.wire_bytes(n, x_N.dtype)), torch.uint8, x_N.device)
        self.codec.encode(x_N.view(1, n), out=wire)
        all_reduce_(group, wire.view(self.codec.wire_dtype(x_N.dtype))[0])
        self.codec.decode(wire, n, out=x_N.view(1, n))

    def bytes_per_rank(self, n: int, size: int) -> float:
        """2 (R-1)/R times the encoded size."""
        return 2 * self.codec.wire_bytes(n, torch.float32) * (size - 1) / size

"""All-reduce by the backend: mean or sum over all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bagua.codecs import Codec, Identity
from bagua.comm.collectives import all_reduce_, sum_of_pieces_
from bagua.comm.groups import Group, Groups
from bagua.comm.pipelined import scatter_gather_rows
from bagua.exchanges.base import Exchange, State, check_codec
from bagua.exchanges.payload_source import PayloadSource
from bagua.exchanges.scatter_gather import ScatterGather, chunk_numel

__all__ = ["AllReduce"]

# gloo's all-reduce fills a link better, but a small one spends its time on some 4 R messages, one after the other.
# At 1 Gbit/s and 5 ms, 4 hosts, direct exchange took 31 ms for 1 MB where gloo took 80; at 0 ms 17 and 15.
_SMALL_BYTES = 2 * 2**20


@dataclass(frozen=True)
class AllReduce(Exchange):
    """All-reduce: x = mean (or sum) over all ranks.

    The mean is taken by dividing before the sum, as `DistributedDataParallel` does: fp16 does not overflow, and
    equal layouts give equal bits.

    Args:
        codec: identity, or a linear codec (bf16, fp16), in which case the sum is taken in that type.
        average: mean if true, else sum.
        direct_bytes: on gloo groups with one rank a node (`Group.direct`) the chunks of tensors up to this size go
            straight to their owners and back instead, and the sum is taken in fp32, in the order of the ranks.

    Bytes: 2 (R-1)/R times the encoded size, sent per rank.

    Examples:
        >>> bagua.exchanges.AllReduce(average=False).codec
        Identity()
    """

    codec: Codec = field(default_factory=Identity)
    average: bool = True
    direct_bytes: int = field(default=_SMALL_BYTES, repr=False)  # says how, not what

    def __post_init__(self) -> None:
        check_codec("AllReduce", self.codec)
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

    @property
    def elementwise(self) -> bool:
        """True."""
        return True

    @property
    def streaming(self) -> bool:
        """True."""
        return True

    def run(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        """Shapes: x_N is [N], any N."""
        group = groups.world
        if group.size == 1:
            return
        if self._goes_direct(x_N, groups):
            if self.codec.lossless:
                _direct(x_N, groups, self.average)
            else:
                ScatterGather(self.codec, average=self.average).run(x_N, state, groups, step)
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

    def reads(self, x_N: Tensor) -> bool:
        """On a CPU: the copy into the payload is then also the division, or the cast."""
        return x_N.device.type == "cpu" and x_N.is_floating_point()

    def run_from(self, source: PayloadSource, state: State, groups: Groups, step: int) -> None:
        """As `run`, with the same bits."""
        x_N, group, codec = source.x_N, groups.world, self.codec
        n, factor = x_N.numel(), 1.0 / group.size if self.average else 1.0
        if group.size == 1 or self._goes_direct(x_N, groups) or n == 0:
            super().run_from(source, state, groups, step)
            return
        if codec.lossless:
            _sum_scaled(group, source, factor)
        else:
            wire_1W = groups.buffers.get("wire", (1, codec.wire_bytes(n, x_N.dtype)), torch.uint8, x_N.device)
            sums_M = wire_1W.view(codec.wire_dtype(x_N.dtype))[0]
            scratch_S = groups.buffers.get("range", (source.scratch_numel(),), x_N.dtype, x_N.device)
            sums_M[n:].zero_()
            for lo, hi in source.ranges(0, n, cached=True):
                y = scratch_S[: hi - lo]
                torch.mul(source.read(lo, hi, scratch_S), factor, out=y)
                sums_M[lo:hi].copy_(y)
            all_reduce_(group, sums_M)
            codec.decode(wire_1W, n, out=x_N.view(1, n))
        source.leave(0, n)

    def _goes_direct(self, x_N: Tensor, groups: Groups) -> bool:
        return groups.world.direct and x_N.nbytes <= self.direct_bytes

    def bytes_per_rank(self, n: int, size: int) -> float:
        """2 (R-1)/R times the encoded size."""
        return 2 * self.codec.wire_bytes(n, torch.float32) * (size - 1) / size


def _sum_scaled(group: Group, source: PayloadSource, factor: float) -> None:
    x_N = source.x_N
    mixed = source.mixed_pieces() if group.mesh is not None and source.hook is None else None
    if mixed is not None and x_N.dtype == torch.float32:
        sum_of_pieces_(group, x_N, [(piece.lo, piece.x) for piece, _ in mixed.pieces], factor)
        return
    source.fill_scaled(factor)
    all_reduce_(group, x_N)


def _direct(x_N: Tensor, groups: Groups, average: bool) -> None:
    """The mean or sum without copies: chunks are sent from `x_N`, and owners' answers land in it."""
    group, codec = groups.world, Identity()
    rank, size, n = group.rank, group.size, x_N.numel()
    c = chunk_numel(n, size)
    chunks = [x_N[r * c : (r + 1) * c] for r in range(size)]
    mine_M = chunks[rank]
    m = mine_M.numel()
    peers_RW = groups.buffers.get("peers", (size, codec.wire_bytes(m, x_N.dtype)), torch.uint8, x_N.device)
    payload_RB = peers_RW[:, : m * x_N.element_size()]

    def write(lo: int, hi: int, out: Tensor) -> None:
        if lo == rank:
            out.copy_(mine_M.view(torch.uint8))

    def combine() -> None:
        codec.decode_mean(peers_RW, m, out=mine_M, weight=1.0 / size if average else 1.0)

    wire = [chunk.view(torch.uint8) for chunk in chunks]
    scatter_gather_rows(group, wire, payload_RB, write=write, combine=combine, read=lambda lo, hi: None)

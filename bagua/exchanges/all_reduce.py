"""All-reduce by the backend: mean or sum over all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bagua.codecs import Codec, Identity
from bagua.comm.collectives import all_reduce_, sum_of_pieces_
from bagua.comm.groups import STRAIGHT_CHUNK_BYTES, Group, Groups
from bagua.comm.ring import sum_by_owners_, sum_gathered_, sum_in_ring_
from bagua.exchanges.base import Exchange, State, check_codec
from bagua.exchanges.payload_source import PayloadSource
from bagua.exchanges.scatter_gather import ScatterGather

__all__ = ["STRAIGHT_CHUNK_BYTES", "AllReduce"]

# gloo's all-reduce takes some 4 R latencies, a ring of sends 2 (R - 1). All senders of a direct exchange meet in the
# receivers' links: at 100 Mbit/s and 0 to 20 ms, 4 hosts, steps of 2.5 M elements took a sixth longer than in a ring.
_SMALL_BYTES = 2 * 2**20


@dataclass(frozen=True)
class AllReduce(Exchange):
    """All-reduce: x = mean (or sum) over all ranks.

    The mean is taken by dividing before the sum, as `DistributedDataParallel` does: fp16 does not overflow, and
    equal layouts give equal bits.

    Args:
        codec: identity, or a linear codec (bf16, fp16), in which case the sum is taken in that type.
        average: mean if true, else sum.
        direct_bytes: on gloo groups with one rank a node (`Group.direct`) tensors up to this size are summed by sends
            of the library's own instead: in a ring, or, where chunks are small, straight to their owners and back. The
            bits are the same, but for types and codecs of 16 bits, which are summed in fp32 then.

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
        if group.size == 1 or x_N.numel() == 0:
            return
        if self._is_summed_wide(x_N, groups):
            ScatterGather(self.codec, average=self.average).run(x_N, state, groups, step)
            return
        if self.average:
            x_N.mul_(1.0 / group.size)
        if self.codec.lossless:
            self._sum_(x_N, groups)
            return
        n = x_N.numel()
        wire = groups.buffers.get("wire", (1, self.codec.wire_bytes(n, x_N.dtype)), torch.uint8, x_N.device)
        self.codec.encode(x_N.view(1, n), out=wire)
        _sum_encoded_(wire.view(self.codec.wire_dtype(x_N.dtype))[0], groups)
        self.codec.decode(wire, n, out=x_N.view(1, n))

    def reads(self, x_N: Tensor) -> bool:
        """On a CPU: the copy into the payload is then also the division, or the cast."""
        return x_N.device.type == "cpu" and x_N.is_floating_point()

    def run_from(self, source: PayloadSource, state: State, groups: Groups, step: int) -> None:
        """As `run`, with the same bits."""
        x_N, group, codec = source.x_N, groups.world, self.codec
        n, factor = x_N.numel(), 1.0 / group.size if self.average else 1.0
        if group.size == 1 or self._is_summed_wide(x_N, groups) or n == 0:
            super().run_from(source, state, groups, step)
            return
        if codec.lossless:
            self._sum_scaled(source, factor, groups)
        else:
            wire_1W = groups.buffers.get("wire", (1, codec.wire_bytes(n, x_N.dtype)), torch.uint8, x_N.device)
            sums_M = wire_1W.view(codec.wire_dtype(x_N.dtype))[0]
            scratch_S = groups.buffers.get("range", (source.scratch_numel(),), x_N.dtype, x_N.device)
            sums_M[n:].zero_()
            for lo, hi in source.ranges(0, n, cached=True):
                y = scratch_S[: hi - lo]
                torch.mul(source.read(lo, hi, scratch_S), factor, out=y)
                sums_M[lo:hi].copy_(y)
            _sum_encoded_(sums_M, groups)
            codec.decode(wire_1W, n, out=x_N.view(1, n))
        source.leave(0, n)

    def _by_sends(self, x_N: Tensor, groups: Groups) -> bool:
        return groups.world.direct and x_N.nbytes <= self.direct_bytes

    def _goes_straight(self, x_N: Tensor, groups: Groups) -> bool:
        group = groups.world
        return self._by_sends(x_N, groups) and x_N.nbytes <= group.size * group.straight_chunk_bytes

    def _is_summed_wide(self, x_N: Tensor, groups: Groups) -> bool:
        narrow = not self.codec.lossless or x_N.dtype in (torch.float16, torch.bfloat16)
        return narrow and self._by_sends(x_N, groups)

    def _sum_scaled(self, source: PayloadSource, factor: float, groups: Groups) -> None:
        x_N, group = source.x_N, groups.world
        in_mesh = group.mesh is not None and not self._goes_straight(x_N, groups) and not _is_swapped(group)
        mixed = source.mixed_pieces() if in_mesh and source.hook is None else None
        if mixed is not None and x_N.dtype == torch.float32:
            sum_of_pieces_(group, x_N, [(piece.lo, piece.x) for piece, _ in mixed.pieces], factor)
            return
        source.fill_scaled(factor)
        self._sum_(x_N, groups)

    def _sum_(self, x_N: Tensor, groups: Groups) -> None:
        """The sum in place. Which way is taken changes no bit."""
        group = groups.world
        if _is_swapped(group):
            sum_gathered_(group, x_N, groups.buffers)
        elif self._goes_straight(x_N, groups):
            way = sum_gathered_ if group.gathers else sum_by_owners_
            way(group, x_N, groups.buffers)
        elif self._by_sends(x_N, groups) and group.mesh is None:
            sum_in_ring_(group, x_N, groups.buffers)
        else:
            all_reduce_(group, x_N)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """2 (R-1)/R times the encoded size."""
        return 2 * self.codec.wire_bytes(n, torch.float32) * (size - 1) / size


def _is_swapped(group: Group) -> bool:
    """Whether two ranks send each other all they have: as many bytes as in a ring, and a latency less."""
    return group.size == 2 and group.gathers


def _sum_encoded_(x_N: Tensor, groups: Groups) -> None:
    if _is_swapped(groups.world):
        sum_gathered_(groups.world, x_N, groups.buffers)
    else:
        all_reduce_(groups.world, x_N)

"""The mean or sum of all ranks through a codec whose wires cannot be summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bagua.codecs import Codec
from bagua.comm.buffers import Buffers
from bagua.comm.groups import Groups
from bagua.comm.pipelined import scatter_gather_rows
from bagua.exchanges.base import Exchange, State
from bagua.exchanges.source import Source

__all__ = ["ScatterGather", "chunk_numel"]

_ALIGN = 16  # elements; a chunk starts where vector loads like it


@dataclass(frozen=True)
class ScatterGather(Exchange):
    """x = Q(mean over ranks of Q(x)): rank r averages everyone's chunk r and gives it to all.

    Both quantisations are Q = decode(encode(.)). With error feedback each of them adds what it lost the last
    time before it encodes, and keeps what it loses now: e += x; x' = Q(e); e -= x', once for what is sent and
    once for the chunk that is owned.

    Args:
        codec: any codec.
        error_feedback: keep both residuals.
        average: mean if true, else sum.

    State: with error feedback, `residual` [N] and `chunk_residual` [C].
    Bytes: 2 (R-1) encoded chunks of C = N/R elements (rounded up to 16), sent per rank.
    Source: the original's ByteGrad; error feedback on both sides as in arXiv:1905.05957 (DoubleSqueeze), section 3.
    Differs: chunks need no padding of the bucket, and the average is taken in fp32 for every payload type.
    """

    codec: Codec
    error_feedback: bool = False
    average: bool = True

    def __post_init__(self) -> None:
        if self.error_feedback and self.codec.lossless:
            raise ValueError(f"error_feedback=True with codec {self.codec.name!r}: a lossless codec leaves no error")

    @property
    def name(self) -> str:
        """scatter_gather, the codec, and whether errors are fed back."""
        return f"scatter_gather[{self.codec.name}{', error feedback' if self.error_feedback else ''}]"

    @property
    def lossy(self) -> bool:
        """Unless the codec is the identity."""
        return not self.codec.lossless

    @property
    def elementwise(self) -> bool:
        """True: a slice is as good as the whole (block boundaries move)."""
        return True

    def init(self, x_N: Tensor, groups: Groups) -> State:
        """Zero residuals; nothing without error feedback or with a single rank."""
        if not self.error_feedback or groups.size == 1:
            return {}
        chunk = torch.zeros(chunk_numel(x_N.numel(), groups.size), dtype=torch.float32, device=x_N.device)
        return {"residual": torch.zeros_like(x_N), "chunk_residual": chunk}

    def reads(self, x_N: Tensor) -> bool:
        """Where the codec can encode parts of a row without temporaries."""
        return x_N.dtype == torch.float32 and self.codec.part_numel(x_N.device) is not None

    def run(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        """Shapes: x_N is [N], any N >= 0."""
        self._run(x_N, None, state, groups)

    def run_from(self, source: Source, state: State, groups: Groups, step: int) -> None:
        """As `run`, with the same bits: rows are encoded from where the elements lie."""
        if groups.world.size == 1 or not self.reads(source.x_N):
            super().run_from(source, state, groups, step)
            return
        self._run(source.x_N, source, state, groups)

    def _run(self, x_N: Tensor, source: Source | None, state: State, groups: Groups) -> None:
        group, buffers, codec = groups.world, groups.buffers, self.codec
        rank, size, n, device = group.rank, group.size, x_N.numel(), x_N.device
        if size == 1 or n == 0:
            return
        c = chunk_numel(n, size)
        dtype = x_N.dtype if codec.lossless else torch.float32
        wire_shape = (size, codec.wire_bytes(c, dtype))
        wire_RW = buffers.get("wire", wire_shape, torch.uint8, device)
        peers_RW = buffers.get("peers", wire_shape, torch.uint8, device)
        weight = 1.0 / size if self.average else 1.0

        def combine() -> None:
            mine_1W = wire_RW[rank : rank + 1]
            if codec.lossless:
                chunk_C = buffers.get("chunk", (c,), dtype, device)
                codec.decode_mean(peers_RW, c, out=chunk_C, weight=weight)
                codec.encode(chunk_C.view(1, c), out=mine_1W)
            else:
                codec.decode_mean_encode(peers_RW, c, weight, residual_N=state.get("chunk_residual"), out=mine_1W)

        scatter_gather_rows(
            group,
            wire_RW,
            peers_RW,
            write=lambda lo, hi, out: self._write(source, x_N, state.get("residual"), lo, hi, c, out, buffers),
            combine=combine,
            read=lambda lo, hi: self._read(source, wire_RW[lo:hi], lo, hi, c, x_N, buffers),
        )

    def bytes_per_rank(self, n: int, size: int) -> float:
        """2 (R-1) encoded chunks."""
        return 2 * (size - 1) * self.codec.wire_bytes(chunk_numel(n, size), torch.float32) if size > 1 else 0

    def _write(
        self,
        source: Source | None,
        x_N: Tensor,
        residual_N: Tensor | None,
        lo: int,
        hi: int,
        c: int,
        out_RW: Tensor,
        buffers: Buffers,
    ) -> None:
        """Encode chunks lo to hi; what fills no row goes through the payload."""
        if source is None:
            self._encode_rows(x_N, residual_N, lo, hi, c, out_RW, buffers)
            return
        align = self.codec.part_numel(x_N.device)
        assert align is not None
        scratch_S = buffers.get("range", (source.scratch_numel(align),), x_N.dtype, x_N.device)
        for row in range(lo, hi):
            first, last = row * c, (row + 1) * c
            if last > x_N.numel():
                source.fill(min(first, x_N.numel()), x_N.numel())
                self._encode_rows(x_N, residual_N, row, hi, c, out_RW[row - lo :], buffers)
                return
            for a, b in source.ranges(first, last, align):
                lost = None if residual_N is None else residual_N[a:b]
                self.codec.encode_part(source.read(a, b, scratch_S), out_RW[row - lo], a - first, c, lost)

    def _read(
        self, source: Source | None, wire_RW: Tensor, lo: int, hi: int, c: int, x_N: Tensor, buffers: Buffers
    ) -> None:
        """Decode chunks lo to hi; `wire_RW` holds only these."""
        if source is None or source.passage is None:
            self._decode_rows(wire_RW, lo, hi, c, x_N, buffers)
            return
        align = self.codec.part_numel(x_N.device)
        assert align is not None
        for row in range(lo, hi):
            first, last = row * c, (row + 1) * c
            if last > x_N.numel():
                self._decode_rows(wire_RW[row - lo :], row, hi, c, x_N, buffers)
                source.leave(min(first, x_N.numel()), x_N.numel())
                return
            for a, b in source.ranges(first, last, align):
                self.codec.decode_part(wire_RW[row - lo], a - first, c, x_N[a:b])
                source.leave(a, b)

    def _encode_rows(
        self, x_N: Tensor, residual_N: Tensor | None, lo: int, hi: int, c: int, out_RW: Tensor, buffers: Buffers
    ) -> None:
        """Encode chunks lo to hi of `x_N`, with feedback if there is a residual. Only what fills no row is copied."""
        full, rest = divmod(x_N.numel(), c)
        whole = min(max(full - lo, 0), hi - lo)
        if whole:
            a, b = lo * c, (lo + whole) * c
            residual_RC = None if residual_N is None else residual_N[a:b].view(whole, c)
            self._encode(x_N[a:b].view(whole, c), residual_RC, out_RW[:whole])
        if whole == hi - lo:
            return
        shape = (hi - lo - whole, c)
        tail_RC = buffers.get("tail", shape, x_N.dtype, x_N.device)
        tail_RC.view(-1)[rest if lo <= full else 0 :].zero_()
        lost_RC = None
        if residual_N is not None:
            lost_RC = buffers.get("tail residual", shape, x_N.dtype, x_N.device)
            lost_RC.view(-1)[rest if lo <= full else 0 :].zero_()
        if lo <= full:
            tail_RC[0, :rest].copy_(x_N[full * c :])
            if lost_RC is not None and residual_N is not None:
                lost_RC[0, :rest].copy_(residual_N[full * c :])
        self._encode(tail_RC, lost_RC, out_RW[whole:])
        if lo <= full and lost_RC is not None and residual_N is not None:
            residual_N[full * c :].copy_(lost_RC[0, :rest])

    def _encode(self, x_RC: Tensor, residual_RC: Tensor | None, out_RW: Tensor) -> None:
        if residual_RC is None:
            self.codec.encode(x_RC, out=out_RW)
        else:
            self.codec.encode_with_feedback(x_RC, residual_RC, out=out_RW)

    def _decode_rows(self, wire_RW: Tensor, lo: int, hi: int, c: int, x_N: Tensor, buffers: Buffers) -> None:
        """Decode chunks lo to hi into `x_N`; `wire_RW` holds only these."""
        full, rest = divmod(x_N.numel(), c)
        whole = min(max(full - lo, 0), hi - lo)
        if whole:
            self.codec.decode(wire_RW[:whole], c, out=x_N[lo * c : (lo + whole) * c].view(whole, c))
        if rest and lo <= full < hi:
            tail = buffers.get("tail", (1, c), x_N.dtype, x_N.device)
            self.codec.decode(wire_RW[full - lo : full - lo + 1], c, out=tail)
            x_N[full * c :].copy_(tail[0, :rest])


def chunk_numel(n: int, size: int) -> int:
    """Elements of one rank's chunk of `n`."""
    per_rank = -(-n // size)
    return -(-per_rank // _ALIGN) * _ALIGN

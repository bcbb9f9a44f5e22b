"""Scatter, average, gather: mean or sum over all ranks with codecs whose encoded rows cannot be summed.

Legend: R = ranks, N = elements of the payload, C = elements of a chunk, W = bytes of an encoded chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bagua.codecs import Codec
from bagua.comm.groups import Groups
from bagua.comm.pipelined import scatter_gather_rows, swap_rows
from bagua.exchanges.base import Exchange, State, check_codec
from bagua.exchanges.native_rows import NativeRows
from bagua.exchanges.payload_source import PayloadSource, Piece
from bagua.exchanges.rows import PartRows, WholeRows, takes_parts
from bagua.exchanges.running_scale import divide_by_scale

__all__ = ["ScatterGather", "chunk_numel"]

_ALIGN = 16  # elements; a chunk starts where vector loads like it


@dataclass(frozen=True)
class ScatterGather(Exchange):
    """x = Q(mean over ranks of Q(x)): rank r averages chunk r of all ranks and sends it to all.

    Both quantisations are Q = decode(encode(.)). With error feedback each of them adds its previous error
    before it encodes, and keeps the new one: e += x; x' = Q(e); e -= x', once for what is sent and
    once for the chunk that is owned.

    Two ranks swap their encoded payloads instead, in as many bytes, and both decode the mean: x = mean over ranks of
    Q(x). That takes one latency instead of two, and nothing is quantised a second time.

    With `running_scale`, Q works on x / s, and the result is multiplied by s: s_i is the root of the running mean of
    |x'_i|, the earlier results of element i. A codec that spreads its error evenly over a block, as `eden` does, then
    spreads it as s. Of all scales, the root gives the least squared error for elements of such magnitudes
    (Cauchy-Schwarz: the sum of s^2 times the sum of x^2 / s^2 is least at s^2 = |x|), and elements that are always
    small get less of the error of large ones, which matters to optimizers that scale each element, such as Adam.

    Args:
        codec: any codec.
        error_feedback: keep both residuals.
        average: mean if true, else sum.
        running_scale: divide each element by its running scale before it is encoded. Not with error feedback.

    State: with error feedback, `residual` [N] and, with more than two ranks, `chunk_residual` [C]; with a running
        scale, `magnitude` [N] in fp32, equal on all ranks.
    Bytes: 2 (R-1) encoded chunks of C = N/R elements (rounded up to 16), sent per rank.
    Source: Bagua 0.9's ByteGrad; error feedback on both sides as in arXiv:1905.05957 (DoubleSqueeze), section 3.
    Differs: chunks need no padding of the bucket, and the average is taken in fp32 for every payload type. With two
        ranks nothing is quantised twice.

    Examples:
        >>> exchange = bagua.exchanges.ScatterGather(bagua.codecs.Int4(), error_feedback=True)
    """

    codec: Codec
    error_feedback: bool = False
    average: bool = True
    running_scale: bool = False

    def __post_init__(self) -> None:
        check_codec("ScatterGather", self.codec)
        if self.running_scale and (self.error_feedback or self.codec.lossless):
            other = "error_feedback=True" if self.error_feedback else f"codec {self.codec.name!r}, which loses nothing"
            raise ValueError(f"running_scale=True cannot be combined with {other}")
        if self.error_feedback and self.codec.lossless:
            raise ValueError(f"error_feedback=True with codec {self.codec.name!r}: a lossless codec leaves no error")

    @property
    def name(self) -> str:
        """scatter_gather, the codec, and whether errors are fed back or elements scaled."""
        extra = ", error feedback" if self.error_feedback else ", running scale" if self.running_scale else ""
        return f"scatter_gather[{self.codec.name}{extra}]"

    @property
    def lossy(self) -> bool:
        """Unless the codec is the identity."""
        return not self.codec.lossless

    @property
    def elementwise(self) -> bool:
        """True: a slice is as good as the whole (block boundaries move)."""
        return True

    @property
    def fed_back(self) -> tuple[str, ...]:
        """The errors of what a rank sends. Those of the chunk that it owns are lost with its place."""
        return ("residual",) if self.error_feedback else ()

    @property
    def outdated(self) -> tuple[str, ...]:
        """Two ranks kept the errors of their chunks until 2026-11-26: those of one step, which are dropped."""
        return ("chunk_residual",)

    def init(self, x_N: Tensor, groups: Groups) -> State:
        """Zero residuals or magnitudes; nothing where neither is kept, or with a single rank."""
        if groups.size == 1:
            return {}
        if self.running_scale:
            return {"magnitude": torch.zeros_like(x_N, dtype=torch.float32)}
        if not self.error_feedback:
            return {}
        if groups.size == 2:
            return {"residual": torch.zeros_like(x_N)}
        chunk = torch.zeros(chunk_numel(x_N.numel(), groups.size), dtype=torch.float32, device=x_N.device)
        return {"residual": torch.zeros_like(x_N), "chunk_residual": chunk}

    def memory(self, state: State, n: int, lo: int, hi: int, groups: Groups) -> Sequence[Tensor]:
        """All residuals; that of the owned chunk where the range meets it. Or the magnitudes."""
        if not self.error_feedback or not state:
            return super().memory(state, n, lo, hi, groups)
        c, found = chunk_numel(n, groups.world.size), [state["residual"].view(-1)[lo:hi]]
        first = groups.world.rank * c
        if "chunk_residual" in state and max(lo, first) < min(hi, first + c):
            found.append(state["chunk_residual"][max(lo, first) - first : min(hi, first + c) - first])
        return found

    def reads(self, x_N: Tensor) -> bool:
        """Where the codec can encode parts of a row without temporaries, and elements are not scaled."""
        return not self.running_scale and takes_parts(self.codec, x_N)

    def run(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        """Shapes: x_N is [N], any N >= 0."""
        if groups.world.size == 1 or x_N.numel() == 0:
            return
        if not self.running_scale:
            self._run_rows(x_N, state, groups)
            return
        magnitude_N, y_N = state["magnitude"].view(-1), x_N
        if x_N.dtype != torch.float32:
            y_N = groups.buffers.get("scaled", (x_N.numel(),), torch.float32, x_N.device).copy_(x_N)
        multiply_back = divide_by_scale(magnitude_N, y_N, groups.buffers)
        self._run_rows(y_N, {}, groups)
        multiply_back()
        if y_N is not x_N:
            x_N.copy_(y_N)

    def _run_rows(self, x_N: Tensor, state: State, groups: Groups) -> None:
        if takes_parts(self.codec, x_N):
            self._run(PayloadSource(x_N, [Piece(0, x_N.numel(), x_N, 0)]), x_N, state, groups)
        else:
            self._run(None, x_N, state, groups)

    def run_from(self, source: PayloadSource, state: State, groups: Groups, step: int) -> None:
        """As `run`, with the same bits: rows are encoded from where the elements lie."""
        if groups.world.size > 1 and source.x_N.numel() and self.reads(source.x_N):
            self._run(source, source.x_N, state, groups)
        else:
            super().run_from(source, state, groups, step)

    def _run(self, source: PayloadSource | None, x_N: Tensor, state: State, groups: Groups) -> None:
        group, buffers, codec = groups.world, groups.buffers, self.codec
        rank, size, n, device = group.rank, group.size, x_N.numel(), x_N.device
        c = chunk_numel(n, size)
        dtype = x_N.dtype if codec.lossless else torch.float32
        both = buffers.get("wire", (2, size, codec.wire_bytes(c, dtype)), torch.uint8, device)
        wire_RW, peers_RW = both
        weight, residual_N = 1.0 / size if self.average else 1.0, state.get("residual")
        chunk_residual_C, swapped = state.get("chunk_residual"), size == 2
        if group.mesh is not None and source is not None and not codec.lossless:
            native = NativeRows.of(codec, source, residual_N, chunk_residual_C, c, weight, wire_RW, peers_RW, swapped)
            if native is not None:
                group.mesh.exchange_encoded(native.encoded)
                nbytes = 2 * (size - 1) * wire_RW.shape[1]
                group.meter.add(nbytes, nbytes)
                return
        if source is None:
            rows = WholeRows(codec, x_N, residual_N, c, buffers)
        else:
            rows = PartRows(codec, source, residual_N, c, buffers)
        if swapped:
            swap_rows(group, both, write=rows.write, read=lambda row: rows.read_mean(row, both[:, row], weight))
            return

        def combine() -> None:
            mine_1W = wire_RW[rank : rank + 1]
            if codec.lossless:
                chunk_C = buffers.get("chunk", (c,), dtype, device)
                codec.decode_mean(peers_RW, c, out=chunk_C, weight=weight)
                codec.encode(chunk_C.view(1, c), out=mine_1W)
            else:
                codec.decode_mean_encode(peers_RW, c, weight, residual_N=chunk_residual_C, out=mine_1W)

        scatter_gather_rows(
            group,
            wire_RW,
            peers_RW,
            write=rows.write,
            combine=combine,
            read=lambda lo, hi: rows.read(lo, hi, wire_RW[lo:hi]),
        )

    def bytes_per_rank(self, n: int, size: int) -> float:
        """2 (R-1) encoded chunks."""
        return 2 * (size - 1) * self.codec.wire_bytes(chunk_numel(n, size), torch.float32) if size > 1 else 0


def chunk_numel(n: int, size: int) -> int:
    """Elements of one rank's chunk of `n`."""
    per_rank = -(-n // size)
    return -(-per_rank // _ALIGN) * _ALIGN

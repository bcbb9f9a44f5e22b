"""Scatter, average, gather: mean or sum over all ranks with codecs whose encoded rows cannot be summed.

Legend: R = ranks, N = elements of the payload, C = elements of a chunk, W = bytes of an encoded chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bagua.codecs import Bf16, Codec
from bagua.comm.buffers import Buffers
from bagua.comm.collectives import all_gather_rows
from bagua.comm.groups import Group, Groups
from bagua.comm.pipelined import scatter_gather_rows, swap_rows
from bagua.exchanges.base import Exchange, State, check_codec
from bagua.exchanges.native_rows import NativeRows
from bagua.exchanges.payload_source import PayloadSource, Piece
from bagua.exchanges.rows import PartRows, WholeRows, takes_parts
from bagua.exchanges.running_scale import divide_by_scale

__all__ = ["ScatterGather", "chunk_numel", "is_of_all"]

_ALIGN = 16  # elements; a chunk starts where vector loads like it
_SITE_CODEC = Bf16()
_TYPICAL = 4096  # elements


@dataclass(frozen=True)
class ScatterGather(Exchange):
    """x = G(mean over ranks of Q(x)): rank r averages chunk r of all ranks and sends it to all.

    Both are quantisations, decode(encode(.)): Q with `codec`, and G with `gather_codec`, the same unless it is given.
    With error feedback each of them adds its previous error before it encodes, and keeps the new one:
    e += x; x' = Q(e); e -= x', once for what is sent and once for the chunk that is owned.

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
        gather_codec: codec of the all-gather phase, which sends the means. None: `codec`. Errors of the ranks
            average out where what they encode agrees, that of the mean does not. And a rank encodes one mean of R: a
            codec that takes long, such as a trellis, costs little there. Not used by two ranks, which encode no mean.

    State: with error feedback, `residual` [N] and, with more than two ranks, `chunk_residual` [C], or [R C] where
        each rank forms all means; with a running scale, `magnitude` [N] in fp32, equal on all ranks.
    Bytes: 2 (R-1) encoded chunks of C = N/R elements (rounded up to 16), sent per rank, half of them with
        `gather_codec`. R (R-1) with `codec` in one latency instead of two, with the same bits, where `Group.gathers`
        says so.
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
    gather_codec: Codec | None = None

    def __post_init__(self) -> None:
        check_codec("ScatterGather", self.codec)
        if self.gather_codec is not None:
            check_codec("ScatterGather", self.gather_codec, "gather_codec")
            if self.codec.lossless or self.gather_codec.lossless:
                name = (self.codec if self.codec.lossless else self.gather_codec).name
                raise ValueError(
                    f"gather_codec: codec {name!r} is lossless, and both phases must be lossy or neither; leave "
                    "gather_codec out, or give another lossy codec"
                )
        if self.running_scale and (self.error_feedback or self.codec.lossless):
            other = "error_feedback=True" if self.error_feedback else f"codec {self.codec.name!r}, which loses nothing"
            raise ValueError(f"running_scale=True cannot be combined with {other}")
        if self.error_feedback and self.codec.lossless:
            raise ValueError(f"error_feedback=True with codec {self.codec.name!r}: a lossless codec leaves no error")

    def __repr__(self) -> str:
        """As of any dataclass, but without `gather_codec` if it is None: saved states from before this option fit."""
        own = (f"{name}={getattr(self, name)!r}" for name in ("codec", "error_feedback", "average", "running_scale"))
        gather = () if self.gather_codec is None else (f"gather_codec={self.gather_codec!r}",)
        return f"{type(self).__name__}({', '.join((*own, *gather))})"

    @property
    def name(self) -> str:
        """scatter_gather, the codecs, and whether errors are fed back or elements scaled."""
        extra = ", error feedback" if self.error_feedback else ", running scale" if self.running_scale else ""
        gather = "" if self.gather_codec is None else f", means in {self.gather_codec.name}"
        return f"scatter_gather[{self.codec.name}{gather}{extra}]"

    def mean_codec(self, size: int) -> Codec:
        """The codec of what is read in the end, among `size` ranks: of means, or of two ranks' versions of a row."""
        return self.codec if size == 2 or self.gather_codec is None else self.gather_codec

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
    def scales_with_payload(self) -> tuple[str, ...]:
        """All that is kept."""
        return ("residual", "chunk_residual", "magnitude")

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
        c = chunk_numel(x_N.numel(), groups.size)
        chunk = torch.zeros((groups.size if groups.world.gathers else 1) * c, dtype=torch.float32, device=x_N.device)
        return {"residual": torch.zeros_like(x_N), "chunk_residual": chunk}

    def fit(self, name: str, saved: Tensor, made: Tensor, groups: Groups) -> Tensor | None:
        """Residuals of all chunks hold that of this rank's; without those of the others, owners form the means."""
        short, long = sorted((saved, made), key=Tensor.numel)
        if name != "chunk_residual" or long.numel() != groups.size * short.numel():
            return None
        return saved if short is saved else _own(saved, groups.world.rank, short.numel()).clone()

    def memory(self, state: State, n: int, lo: int, hi: int, groups: Groups) -> Sequence[Tensor]:
        """All residuals; that of the owned chunk where the range meets it. Or the magnitudes."""
        if not self.error_feedback or not state:
            return super().memory(state, n, lo, hi, groups)
        c, found = chunk_numel(n, groups.world.size), [state["residual"].view(-1)[lo:hi]]
        first = groups.world.rank * c
        if "chunk_residual" in state and is_of_all(state["chunk_residual"], n, groups.world.size):
            found.append(state["chunk_residual"][lo:hi])
        elif "chunk_residual" in state and max(lo, first) < min(hi, first + c):
            found.append(state["chunk_residual"][max(lo, first) - first : min(hi, first + c) - first])
        return found

    def reads(self, x_N: Tensor) -> bool:
        """Where the codec can encode parts of a row without temporaries, and elements are not scaled."""
        return not self.running_scale and self._takes_parts(x_N)

    def _takes_parts(self, x_N: Tensor) -> bool:
        return all(takes_parts(codec, x_N) for codec in (self.codec, self.gather_codec or self.codec))

    def run(self, x_N: Tensor, state: State, groups: Groups, step: int) -> None:
        """Shapes: x_N is [N], any N >= 0."""
        if groups.world.size > 1:
            self.run_encoded(x_N, state, groups, step)

    def _run_rows(self, x_N: Tensor, state: State, groups: Groups) -> Sequence[Tensor]:
        if self._takes_parts(x_N):
            return self._run(PayloadSource(x_N, [Piece(0, x_N.numel(), x_N, 0)]), x_N, state, groups)
        return self._run(None, x_N, state, groups)

    @property
    def encodes(self) -> bool:
        """Where something is encoded, and the result is that of the codec, scaled or not."""
        return not self.codec.lossless and type(self).run is ScatterGather.run

    @property
    def addend_codec(self) -> Codec | None:
        """bf16 where the own codec sends less.

        Its error is relative to each element, and 0 stays 0, so nothing that is small or scaled is blurred.
        """
        less = self.codec.wire_bytes(_TYPICAL) < _SITE_CODEC.wire_bytes(_TYPICAL)
        return _SITE_CODEC if self.encodes and less else None

    @property
    def of_results(self) -> tuple[str, ...]:
        """The magnitudes."""
        return ("magnitude",) if self.running_scale else ()

    def run_encoded(self, x_N: Tensor, state: State, groups: Groups, step: int) -> Sequence[Tensor]:
        """As `run`. Two ranks return both versions of row 0, then those of row 1; more ranks the mean of each row."""
        if x_N.numel() == 0:
            return []
        if not self.running_scale:
            return self._run_rows(x_N, state, groups)
        y_N = self._unscaled(x_N, groups.buffers).copy_(x_N)
        multiply_back = divide_by_scale(state["magnitude"].view(-1), y_N, groups.buffers)
        encoded = self._run_rows(y_N, {}, groups)
        multiply_back()
        x_N.copy_(y_N)
        return encoded

    def _unscaled(self, x_N: Tensor, buffers: Buffers) -> Tensor:
        """Where elements divided by their scales have a place: in fp32."""
        if x_N.dtype == torch.float32:
            return x_N
        return buffers.get("scaled", (x_N.numel(),), torch.float32, x_N.device)

    def encoded_shape(self, n: int, size: int) -> tuple[int, int]:
        """R rows of C elements; two ranks: two versions of both rows."""
        width = self.mean_codec(size).wire_bytes(chunk_numel(n, size), torch.float32)
        return (4 if size == 2 else size) if n else 0, width

    def read_encoded(self, encoded_KW: Tensor, x_N: Tensor, state: State, size: int, buffers: Buffers) -> None:
        """Decode the means, multiply by the scales."""
        if x_N.numel() == 0:
            return
        if not self.running_scale:
            self._read_means(encoded_KW, x_N, size, buffers)
            return
        y_N = self._unscaled(x_N, buffers)
        multiply_back = divide_by_scale(state["magnitude"].view(-1), y_N.zero_(), buffers)
        self._read_means(encoded_KW, y_N, size, buffers)
        multiply_back()
        x_N.copy_(y_N)

    def _read_means(self, encoded_KW: Tensor, x_N: Tensor, size: int, buffers: Buffers) -> None:
        rows = WholeRows(self.mean_codec(size), x_N, None, chunk_numel(x_N.numel(), size), buffers)
        if size > 2:
            rows.read(0, size, encoded_KW)
            return
        for row in range(size):
            rows.read_mean(row, encoded_KW[size * row : size * (row + 1)], 1.0 / size if self.average else 1.0)

    def run_from(self, source: PayloadSource, state: State, groups: Groups, step: int) -> None:
        """As `run`, with the same bits: rows are encoded from where the elements lie."""
        if groups.world.size > 1 and source.x_N.numel() and self.reads(source.x_N):
            self._run(source, source.x_N, state, groups)
        else:
            super().run_from(source, state, groups, step)

    def _run(self, source: PayloadSource | None, x_N: Tensor, state: State, groups: Groups) -> Sequence[Tensor]:
        """Returns what `run_encoded` does."""
        group, buffers, codec = groups.world, groups.buffers, self.codec
        rank, size, n, device = group.rank, group.size, x_N.numel(), x_N.device
        c = chunk_numel(n, size)
        dtype = x_N.dtype if codec.lossless else torch.float32
        if size > 2 and _gathers(state, group, c):
            return self._run_gathered(source, x_N, state, groups, c, codec.wire_bytes(c, dtype))
        both = buffers.get("wire", (2, size, codec.wire_bytes(c, dtype)), torch.uint8, device)
        wire_RW, peers_RW = both
        weight, residual_N = 1.0 / size if self.average else 1.0, state.get("residual")
        chunk_residual_C, swapped = state.get("chunk_residual"), size == 2
        apart, means_RW = self._apart(size, c, dtype, device, buffers), wire_RW
        if apart is not None:
            means_RW = apart[1]
        if group.mesh is not None and source is not None and not codec.lossless:
            native = NativeRows.of(
                codec, source, residual_N, chunk_residual_C, c, weight, wire_RW, peers_RW, swapped, apart
            )
            if native is not None:
                group.mesh.exchange_encoded(native.encoded)
                nbytes = (size - 1) * (wire_RW.shape[1] + means_RW.shape[1])
                group.meter.add(nbytes, nbytes)
                return [*both[1 - rank], *both[rank]] if swapped else list(means_RW)
        rows = _rows(codec, x_N, source, residual_N, c, buffers)
        if swapped:
            swap_rows(group, both, write=rows.write, read=lambda row: rows.read_mean(row, both[:, row], weight))
            return [both[version, row] for row in (0, 1) for version in (0, 1)]
        means = rows if apart is None else _rows(apart[0], x_N, source, None, c, buffers)
        scatter_gather_rows(
            group,
            wire_RW,
            peers_RW,
            write=rows.write,
            combine=lambda: self._form_mean(peers_RW, x_N, c, buffers, chunk_residual_C, means_RW[rank : rank + 1]),
            read=lambda lo, hi: means.read(lo, hi, means_RW[lo:hi]),
            means_RW=means_RW,
        )
        return list(means_RW)

    def _apart(
        self, size: int, c: int, dtype: torch.dtype, device: torch.device, buffers: Buffers
    ) -> tuple[Codec, Tensor, Tensor] | None:
        """Where means have another codec: that, their encoded rows, and scratch for one of them."""
        codec = self.mean_codec(size)
        if codec == self.codec:
            return None
        means_RW = buffers.get("mean", (size, codec.wire_bytes(c, dtype)), torch.uint8, device)
        return codec, means_RW, buffers.get("chunk", (c,), dtype, device)

    def _run_gathered(
        self, source: PayloadSource | None, x_N: Tensor, state: State, groups: Groups, c: int, width: int
    ) -> Sequence[Tensor]:
        """As with an owner of each chunk, with the same bits: each rank does what all the owners do."""
        group, buffers, size = groups.world, groups.buffers, groups.size
        rows, made = _rows(self.codec, x_N, source, state.get("residual"), c, buffers), self.mean_codec(size)
        means = rows if made == self.codec else _rows(made, x_N, source, None, c, buffers)
        chunks = state.get("chunk_residual")
        versions_VRW = buffers.get("versions", (size, size, width), torch.uint8, x_N.device)
        dtype = x_N.dtype if made.lossless else torch.float32
        means_RW = buffers.get("mean", (size, made.wire_bytes(c, dtype)), torch.uint8, x_N.device)
        rows.write(0, size, versions_VRW[group.rank])
        all_gather_rows(group, versions_VRW.view(size, size * width))
        for row in range(size):
            residual_C = None if chunks is None else _own(chunks, row, c)
            mean_1W = means_RW[row : row + 1]
            self._form_mean(versions_VRW[:, row], x_N, c, buffers, residual_C, mean_1W)
            means.read(row, row + 1, mean_1W)
        return list(means_RW)

    def _form_mean(
        self, versions_RW: Tensor, x_N: Tensor, c: int, buffers: Buffers, residual_C: Tensor | None, out_1W: Tensor
    ) -> None:
        """Of the ranks' versions of a chunk, encoded again."""
        codec, weight = self.codec, 1.0 / len(versions_RW) if self.average else 1.0
        made = self.mean_codec(len(versions_RW))
        if made == codec and not codec.lossless:
            codec.decode_mean_encode(versions_RW, c, weight, residual_N=residual_C, out=out_1W)
            return
        chunk_C = buffers.get("chunk", (c,), x_N.dtype if codec.lossless else torch.float32, x_N.device)
        codec.decode_mean(versions_RW, c, out=chunk_C, weight=weight)
        if residual_C is None:
            made.encode(chunk_C.view(1, c), out=out_1W)
        else:
            made.encode_with_feedback(chunk_C.view(1, c), residual_C.view(1, c), out=out_1W)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """2 (R-1) encoded chunks, half of them with the codec of means."""
        if size < 2:
            return 0
        c = chunk_numel(n, size)
        return (size - 1) * sum(each.wire_bytes(c, torch.float32) for each in (self.codec, self.mean_codec(size)))


def _gathers(state: State, group: Group, c: int) -> bool:
    """Whether each rank forms all means itself. If not, the errors of other owners are dropped."""
    chunks = state.get("chunk_residual")
    if chunks is None or chunks.numel() == c:
        return group.gathers and chunks is None
    if not group.gathers:
        state["chunk_residual"] = _own(chunks, group.rank, c).clone()
    return group.gathers


def _own(chunks: Tensor, rank: int, c: int) -> Tensor:
    return chunks[rank * c : (rank + 1) * c]


def _rows(
    codec: Codec, x_N: Tensor, source: PayloadSource | None, residual_N: Tensor | None, c: int, buffers: Buffers
) -> WholeRows | PartRows:
    if source is None:
        return WholeRows(codec, x_N, residual_N, c, buffers)
    return PartRows(codec, source, residual_N, c, buffers)


def is_of_all(chunk_residual: Tensor, n: int, size: int) -> bool:
    """Whether it holds the errors of all owners of chunks of `n` elements, and not those of one of them."""
    return size > 1 and chunk_residual.numel() == size * chunk_numel(n, size)


def chunk_numel(n: int, size: int) -> int:
    """Elements of one rank's chunk of `n`."""
    per_rank = -(-n // size)
    return -(-per_rank // _ALIGN) * _ALIGN

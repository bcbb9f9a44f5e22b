"""A payload as rows of equal length, one per rank: encoding and decoding.

Legend: R = rows, C = elements of a row, W = bytes of an encoded row. Rows that stick out of the payload count as
padded with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.codecs import Codec
from bagua.comm.buffers import Buffers
from bagua.exchanges.payload_source import PayloadSource

__all__ = ["PartRows", "WholeRows", "takes_parts"]


def takes_parts(codec: Codec, x_N: Tensor) -> bool:
    """Whether `PartRows` can be used."""
    return x_N.dtype == torch.float32 and codec.part_numel(x_N.device) is not None


class WholeRows:
    """Encodes and decodes several rows at once; only what fills no row is copied.

    Args:
        codec: any.
        x_N: the payload.
        residual_N: the earlier compression error, like `x_N`; None without error feedback.
        c: elements of a row.
        buffers: for scratch.
    """

    def __init__(self, codec: Codec, x_N: Tensor, residual_N: Tensor | None, c: int, buffers: Buffers) -> None:
        self._codec, self._x_N, self._residual_N, self._c, self._buffers = codec, x_N, residual_N, c, buffers

    def write(self, lo: int, hi: int, out_RW: Tensor) -> None:
        """Encode rows lo to hi into `out_RW`, which holds only these; with feedback if there is a residual."""
        x_N, residual_N, c, buffers = self._x_N, self._residual_N, self._c, self._buffers
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
            self._codec.encode(x_RC, out=out_RW)
        else:
            self._codec.encode_with_feedback(x_RC, residual_RC, out=out_RW)

    def read_mean(self, row: int, versions_RW: Tensor, weight: float) -> None:
        """Decode the sum of the versions of a row, times `weight`, into the payload."""
        x_N, c = self._x_N, self._c
        first, stop = row * c, min((row + 1) * c, x_N.numel())
        if stop == first + c:
            self._codec.decode_mean(versions_RW, c, x_N[first:stop], weight)
        elif first < stop:
            tail = self._buffers.get("tail", (1, c), x_N.dtype, x_N.device)
            self._codec.decode_mean(versions_RW, c, tail[0], weight)
            x_N[first:].copy_(tail[0, : stop - first])

    def read(self, lo: int, hi: int, wire_RW: Tensor) -> None:
        """Decode rows lo to hi into the payload; `wire_RW` holds only these."""
        x_N, c = self._x_N, self._c
        full, rest = divmod(x_N.numel(), c)
        whole = min(max(full - lo, 0), hi - lo)
        if whole:
            self._codec.decode(wire_RW[:whole], c, out=x_N[lo * c : (lo + whole) * c].view(whole, c))
        if rest and lo <= full < hi:
            tail = self._buffers.get("tail", (1, c), x_N.dtype, x_N.device)
            self._codec.decode(wire_RW[full - lo : full - lo + 1], c, out=tail)
            x_N[full * c :].copy_(tail[0, :rest])


class PartRows:
    """As `WholeRows`, with the same bits: rows are encoded in parts, from where their elements lie.

    Only the elements of the payload's last block are copied.

    Args:
        codec: one that `takes_parts`.
        source: of the payload.
        residual_N, c, buffers: as for `WholeRows`.
    """

    def __init__(
        self, codec: Codec, source: PayloadSource, residual_N: Tensor | None, c: int, buffers: Buffers
    ) -> None:
        self._codec, self._source, self._residual_N, self._c, self._buffers = codec, source, residual_N, c, buffers
        self._x_N = source.x_N
        align = codec.part_numel(self._x_N.device)
        assert align is not None
        self._align = align
        self._lerps = source.lerps and codec.part_lerps(self._x_N.device)

    def _ends(self, row: int) -> tuple[int, int, int, int]:
        """Where a row begins, where its last whole block ends, where the payload ends in it, where the row ends."""
        first, last = row * self._c, (row + 1) * self._c
        stop = max(min(last, self._x_N.numel()), first)
        body = last if stop == last else first + (stop - first) // self._align * self._align
        return first, body, stop, last

    def write(self, lo: int, hi: int, out_RW: Tensor) -> None:
        """Encode rows lo to hi into `out_RW`, which holds only these; with feedback if there is a residual."""
        source, codec, residual_N = self._source, self._codec, self._residual_N
        scratch_S = self._scratch("range", source.scratch_numel(self._align))
        for row, wire_W in zip(range(lo, hi), out_RW, strict=True):
            first, body, stop, last = self._ends(row)
            for a, b in source.ranges(first, body, self._align, lerps=self._lerps):
                lost = None if residual_N is None else residual_N[a:b]
                found = source.mixed(a, b) if self._lerps else None
                if found is None:
                    codec.encode_part(source.read(a, b, scratch_S), wire_W, a - first, self._c, lost)
                else:
                    x, other = found
                    lerp = None if other is None else other[:2]
                    codec.encode_part(x, wire_W, a - first, self._c, lost, lerp)
            if body == last:
                continue
            m, tail = stop - body, self._scratch("tail", last - body)
            if m:
                tail[:m].copy_(source.read(body, stop, scratch_S))
            tail[m:].zero_()
            lost = None
            if residual_N is not None:
                lost = self._scratch("tail residual", last - body)
                lost[:m].copy_(residual_N[body:stop])
                lost[m:].zero_()
            codec.encode_part(tail, wire_W, body - first, self._c, lost)
            if residual_N is not None and lost is not None:
                residual_N[body:stop].copy_(lost[:m])

    def read_mean(self, row: int, versions_RW: Tensor, weight: float) -> None:
        """Decode the sum of the versions of a row, times `weight`, into the payload."""
        WholeRows(self._codec, self._x_N, None, self._c, self._buffers).read_mean(row, versions_RW, weight)
        self._source.leave(row * self._c, min((row + 1) * self._c, self._x_N.numel()))

    def read(self, lo: int, hi: int, wire_RW: Tensor) -> None:
        """Decode rows lo to hi into the payload; `wire_RW` holds only these."""
        source, codec, x_N = self._source, self._codec, self._x_N
        for row, wire_W in zip(range(lo, hi), wire_RW, strict=True):
            first, body, stop, last = self._ends(row)
            # Unless a hook reads it, the next to do so is the optimizer.
            whole = source.hook is None
            for a, b in ((first, body),) if whole else source.ranges(first, body, self._align, lerps=self._lerps):
                found = source.mixed(a, b) if self._lerps else None
                if found is None:
                    codec.decode_part(wire_W, a - first, self._c, x_N[a:b], soon=not whole)
                    source.leave(a, b)
                else:
                    _, other = found
                    lerp = None if other is None else (other[0], other[2])
                    codec.decode_part(wire_W, a - first, self._c, x_N[a:b], soon=False, lerp=lerp)
            if body < stop:
                tail = self._scratch("tail", last - body)
                codec.decode_part(wire_W, body - first, self._c, tail)
                x_N[body:stop].copy_(tail[: stop - body])
                source.leave(body, stop)

    def _scratch(self, name: str, numel: int) -> Tensor:
        return self._buffers.get(name, (numel,), self._x_N.dtype, self._x_N.device)

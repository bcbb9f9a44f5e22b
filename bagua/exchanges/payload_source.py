"""The payload of an exchange, whose elements may lie elsewhere until the exchange reads them.

Gradients need not be copied into the payload to be encoded, and work on elements costs least while they are in a
core's cache anyway. So an exchange may read its payload range by range from where it is.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bagua.exchanges.elementwise_hook import ElementwiseHook, LerpHook

__all__ = ["MixedPieces", "PayloadSource", "Piece"]

_CACHED = 1 << 18  # elements of a range that several operations work on; for fewer the calls cost more than memory


@dataclass(frozen=True, eq=False)
class Piece:
    """A run of the payload that belongs to one tensor.

    Attributes:
        lo, hi: its place in the payload.
        x: [hi - lo] its elements, in the payload or elsewhere.
        index: the tensor's number in the bucket.
        begin: which of the tensor's elements is the first.
    """

    lo: int
    hi: int
    x: Tensor
    index: int
    begin: int = 0


@dataclass(frozen=True, eq=False)
class MixedPieces:
    """All of a payload, and what a `LerpHook` mixes in.

    Attributes:
        pieces: in order, each with the other tensor's elements [hi - lo]; None without a hook.
        weights: on the way in and out; None without a hook.
    """

    pieces: Sequence[tuple[Piece, Tensor | None]]
    weights: tuple[float, float] | None


class PayloadSource:
    """A payload whose elements may lie elsewhere until the exchange reads them.

    Args:
        x_N: the payload; holds the result in the end. [N], on a CPU.
        pieces: all of it, in order, without gaps.
        hook: transforms each element before and after the exchange, or None.
    """

    def __init__(self, x_N: Tensor, pieces: Sequence[Piece], hook: ElementwiseHook | None = None) -> None:
        self.x_N, self.hook = x_N, hook
        self._pieces = pieces
        self._starts = [piece.lo for piece in pieces]

    @property
    def passage(self) -> ElementwiseHook | None:
        """Deprecated name of `hook`."""
        warnings.warn("PayloadSource.passage is called hook now", FutureWarning, stacklevel=2)
        return self.hook

    def part(self, lo: int, hi: int) -> PayloadSource:
        """The source of `x_N[lo:hi]`."""
        cut = [
            replace(p, lo=a - lo, hi=b - lo, x=p.x[a - p.lo : b - p.lo], begin=p.begin + a - p.lo)
            for p, a, b in self._within(lo, hi)
        ]
        return PayloadSource(self.x_N[lo:hi], cut, self.hook)

    @property
    def lerps(self) -> bool:
        """Whether `mixed` may be called."""
        return isinstance(self.hook, LerpHook)

    def mixed(self, lo: int, hi: int) -> tuple[Tensor, tuple[Tensor, float, float] | None] | None:
        """A range's elements, and the other tensor's with its weights; None if they are not in one place."""
        assert isinstance(self.hook, LerpHook)
        pieces = list(self._within(lo, hi))
        if len(pieces) != 1:
            return None
        p, a, b = pieces[0]
        found, at = self.hook.others[p.index], p.begin + a - p.lo
        other = None if found is None else (found[0][at : at + b - a], *found[1:])
        return p.x[a - p.lo : b - p.lo], other

    def mixed_pieces(self) -> MixedPieces | None:
        """Everything that compiled code needs to read the payload; None if it needs more than one pair of weights."""
        if self.hook is None:
            return MixedPieces([(piece, None) for piece in self._pieces], None)
        if not isinstance(self.hook, LerpHook):
            return None
        found = [self.hook.others[piece.index] for piece in self._pieces]
        weights = {None if each is None else each[1:] for each in found}
        if len(weights) != 1:
            return None
        others = [
            None if each is None else each[0][piece.begin : piece.begin + piece.hi - piece.lo]
            for piece, each in zip(self._pieces, found, strict=True)
        ]
        return MixedPieces(list(zip(self._pieces, others, strict=True)), weights.pop())

    def ranges(
        self, lo: int, hi: int, align: int = 1, cached: bool = False, lerps: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Cut `lo` to `hi` into ranges for `read`, of a multiple of `align` elements each but for the last one.

        Args:
            lo, hi: of the payload.
            align: elements of a block that must not be cut.
            cached: a range shall fit a cache, since several operations follow.
            lerps: the codec does what the hook does. Ranges that are not in one place fit `read` still.
        """
        short = cached or (self.hook is not None and not lerps)
        most = max(_CACHED // align, 1) * align if short else hi - lo
        at = lo
        while at < hi:
            piece = self._pieces[bisect_right(self._starts, at) - 1]
            end = min(piece.hi, hi, at + most)
            if end < hi:
                end = min(at + max((end - at) // align, 1) * align, hi)
            yield at, end
            at = end

    @staticmethod
    def scratch_numel(align: int = 1) -> int:
        """Elements that `read` needs for ranges that `ranges` makes."""
        return max(_CACHED, align)

    def read(self, lo: int, hi: int, scratch_S: Tensor) -> Tensor:
        """Return the elements [hi - lo] as they enter the exchange; in `scratch_S` where they are not in one place."""
        out = scratch_S[: hi - lo]
        pieces = list(self._within(lo, hi))
        if len(pieces) == 1:
            p, a, b = pieces[0]
            return self._enter(p, a, b, out)
        for p, a, b in pieces:
            _put(self._enter(p, a, b, out[a - lo : b - lo]), out[a - lo : b - lo])
        return out

    def fill(self, lo: int, hi: int) -> None:
        """Put the elements into the payload, as they enter the exchange."""
        for p, a, b in self._within(lo, hi):
            _put(self._enter(p, a, b, self.x_N[a:b]), self.x_N[a:b])

    def fill_scaled(self, factor: float) -> None:
        """Put all elements, times `factor`, into the payload."""
        for piece in self._pieces:
            y = self.x_N[piece.lo : piece.hi]
            torch.mul(self._enter(piece, piece.lo, piece.hi, y), factor, out=y)

    def leave(self, lo: int, hi: int) -> None:
        """The results of a range are in the payload."""
        if self.hook is not None:
            for p, a, b in self._within(lo, hi):
                self.hook.leave(p.index, p.begin + a - p.lo, p.begin + b - p.lo, self.x_N[a:b])

    def _enter(self, piece: Piece, a: int, b: int, out: Tensor) -> Tensor:
        x = piece.x[a - piece.lo : b - piece.lo]
        if self.hook is None:
            return x
        return self.hook.enter(piece.index, piece.begin + a - piece.lo, piece.begin + b - piece.lo, x, out)

    def _within(self, lo: int, hi: int) -> Iterator[tuple[Piece, int, int]]:
        """The pieces that overlap a range, each with the part of the range that is in it."""
        if lo >= hi:
            return
        for piece in self._pieces[max(bisect_right(self._starts, lo) - 1, 0) :]:
            if piece.lo >= hi:
                return
            yield piece, max(piece.lo, lo), min(piece.hi, hi)


def _put(x: Tensor, out: Tensor) -> None:
    if x.data_ptr() != out.data_ptr():
        out.copy_(x)

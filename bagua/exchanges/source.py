"""Where the elements of a payload lie before an exchange, and what is done to each on its way in and out.

Gradients need not be copied into the payload to be encoded, and work on elements costs least while they are in a
core's cache anyway. So an exchange may read its payload range by range from where it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Lerps", "Passage", "Piece", "Source"]

_CACHED = 1 << 18  # elements of a range that several operations work on; for fewer the calls cost more than memory


class Passage(Protocol):
    """Work on each element on its way into an exchange and out of it.

    Legend: `index` is the tensor's number in the bucket, `lo` and `hi` a range of its elements in the order in which
    they lie in memory. Called on lanes, for several ranges at once, and for each element once.
    """

    def enter(self, index: int, lo: int, hi: int, x: Tensor, out: Tensor) -> Tensor:
        """Return what is exchanged for `x`: `x` itself, unchanged, or `out`, which may be the same memory."""
        ...

    def leave(self, index: int, lo: int, hi: int, x: Tensor) -> None:
        """Turn the result of the exchange into what the payload shall hold, in place."""
        ...


@dataclass(frozen=True, eq=False)
class Lerps:
    """A passage of which both ways are a `torch.lerp`, which codecs may do themselves.

    Attributes:
        others: for each tensor of the bucket: another one, flat, in the order in which the elements lie in memory,
            the weight on the way in and that on the way out; None where elements stay as they are.
    """

    others: Sequence[tuple[Tensor, float, float] | None]

    def enter(self, index: int, lo: int, hi: int, x: Tensor, out: Tensor) -> Tensor:
        """Mix into `out`."""
        found = self.others[index]
        return x if found is None else torch.lerp(x, found[0][lo:hi], found[1], out=out)

    def leave(self, index: int, lo: int, hi: int, x: Tensor) -> None:
        """Mix in place."""
        found = self.others[index]
        if found is not None:
            x.lerp_(found[0][lo:hi], found[2])


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


class Source:
    """A payload whose elements may lie elsewhere until the exchange reads them.

    Args:
        x_N: the payload; holds the result in the end. [N], on a CPU.
        pieces: all of it, in order, without gaps.
        passage: what is done to the elements, or None.
    """

    def __init__(self, x_N: Tensor, pieces: Sequence[Piece], passage: Passage | None = None) -> None:
        self.x_N, self.passage = x_N, passage
        self._pieces = pieces
        self._starts = [piece.lo for piece in pieces]

    def part(self, lo: int, hi: int) -> Source:
        """The source of `x_N[lo:hi]`."""
        cut = [
            replace(p, lo=a - lo, hi=b - lo, x=p.x[a - p.lo : b - p.lo], begin=p.begin + a - p.lo)
            for p, a, b in self._within(lo, hi)
        ]
        return Source(self.x_N[lo:hi], cut, self.passage)

    @property
    def lerps(self) -> bool:
        """Whether `mixed` may be asked."""
        return isinstance(self.passage, Lerps)

    def mixed(self, lo: int, hi: int) -> tuple[Tensor, tuple[Tensor, float, float] | None] | None:
        """The elements of a range, and of the tensor in `Lerps`, with its weights; None if not all are in one place."""
        assert isinstance(self.passage, Lerps)
        pieces = list(self._within(lo, hi))
        if len(pieces) != 1:
            return None
        p, a, b = pieces[0]
        found, at = self.passage.others[p.index], p.begin + a - p.lo
        other = None if found is None else (found[0][at : at + b - a], *found[1:])
        return p.x[a - p.lo : b - p.lo], other

    def ranges(
        self, lo: int, hi: int, align: int = 1, cached: bool = False, lerps: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Cut `lo` to `hi` into ranges for `read`, of a multiple of `align` elements each but for the last one.

        Args:
            lo, hi: of the payload.
            align: elements of a block that must not be cut.
            cached: a range shall fit a cache, since several operations follow.
            lerps: the codec does what the passage does. Ranges that are not in one place fit `read` still.
        """
        short = cached or (self.passage is not None and not lerps)
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
        if self.passage is not None:
            for p, a, b in self._within(lo, hi):
                self.passage.leave(p.index, p.begin + a - p.lo, p.begin + b - p.lo, self.x_N[a:b])

    def _enter(self, piece: Piece, a: int, b: int, out: Tensor) -> Tensor:
        x = piece.x[a - piece.lo : b - piece.lo]
        if self.passage is None:
            return x
        return self.passage.enter(piece.index, piece.begin + a - piece.lo, piece.begin + b - piece.lo, x, out)

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

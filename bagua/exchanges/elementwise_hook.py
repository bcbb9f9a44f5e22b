"""Hooks that transform each element of a payload before and after an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["ElementwiseHook", "LerpHook"]


class ElementwiseHook(Protocol):
    """Transforms each element of a payload before and after an exchange.

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
class LerpHook:
    """A hook that is a `torch.lerp` in both directions, which codecs can fuse into encoding and decoding.

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

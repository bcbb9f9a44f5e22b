"""Neighbouring parameters in an arena that the optimizer steps alike."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from bagua.optim.fused.slots import Slot

__all__ = ["Unit", "cut"]

_ROUND = 64  # pieces begin at multiples of so many elements of a unit


@dataclass(eq=False)
class Unit:
    """Neighbouring parameters with a gradient and equal scalar state, cut into pieces.

    Attributes:
        first, last: positions of its parameters in the arena; last is exclusive.
        slots: the optimizer's state of each piece; kept after the unit's end for the scalars in it.
        bounds: element range of each piece in the arena.
        pieces: the flat parameters that the optimizer sees.
        known: the tensors in `slots` that need no look any more.
    """

    first: int
    last: int
    slots: list[Slot]
    bounds: list[tuple[int, int]] = field(default_factory=list)
    pieces: list[nn.Parameter] = field(default_factory=list)
    known: list[Slot] = field(default_factory=list)


def cut(lo: int, hi: int, chunk: int | None) -> list[tuple[int, int]]:
    """`lo` to `hi` in equal pieces of about `chunk` elements, none of a single element."""
    if chunk is None or hi - lo <= chunk:
        return [(lo, hi)]
    count = -(-(hi - lo) // chunk)
    step = -(-(hi - lo) // count)
    step = -(-step // _ROUND) * _ROUND if step > _ROUND else step
    bounds = [(at, min(at + step, hi)) for at in range(lo, hi, step)]
    if bounds[-1][1] - bounds[-1][0] == 1:
        bounds[-2:] = [(bounds[-2][0], hi)]
    return bounds

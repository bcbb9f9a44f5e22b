"""Detects gradients that are views of persistent flat tensors, such as the buckets of `bagua.distribute`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

__all__ = ["PartWatch"]

_TRIES = 3


class PartWatch:
    """Distinguishes bucket views from gradients that autograd allocates.

    autograd also makes gradients that are parts of something, anew in each pass. Those of buckets are the same
    objects at two steps in a row.

    Args:
        is_part: whether a gradient is part of something that is not ours.

    Attributes:
        settled: nothing new is to be expected, no look is needed.
    """

    def __init__(self, is_part: Callable[[Tensor], bool]) -> None:
        self._is_part = weakref.WeakMethod(is_part)  # the watch belongs to its owner: no cycle
        self._seen: list[tuple[int, weakref.ref[Tensor]]] = []
        self._failures = 0  # parts that were others at the next step
        self._found = False
        self.settled = False

    def look(self, grads: Sequence[Tensor | None], candidates: Sequence[int]) -> Literal["parts", "none", "unsure"]:
        """What the gradients are; "unsure" at the first sight of parts."""
        if self._failures >= _TRIES:
            self.settled = True
            return "none"
        if self._found:
            return "parts"
        if self._seen:
            self._found = self.settled = all(at < len(grads) and _same(grads[at], ref) for at, ref in self._seen)
            self._seen = []
            if self._found:
                return "parts"
            self._failures += 1
        is_part = self._is_part()
        assert is_part is not None
        parts = [(at, grad) for at in candidates if (grad := grads[at]) is not None and is_part(grad)]
        self._seen = [(at, weakref.ref(grad)) for at, grad in parts]
        return "unsure" if parts else "none"

    def lost(self) -> None:
        """The gradients are no longer where they were."""
        self._found = self.settled = False
        self._failures += 1


def _same(grad: Tensor | None, ref: weakref.ref[Tensor]) -> bool:
    return grad is not None and grad is ref()

"""Detects weights that change although no tracked optimizer steps."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import nn

__all__ = ["PassWatch"]

_CHANGES = 16  # of weights without a step; methods that try several weights in a step need fewer
_SAMPLES = 4  # parameters whose first values are looked at: changes to `param.data` are not counted by torch
_VALUES = 4
_version_of = operator.attrgetter("_version")


class PassWatch:
    """Counts synchronised backward passes between steps.

    Several passes a step are legal, and so are changes of weights by hand. Only where there are more passes than
    there ever were between two steps, the weights are looked at.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        every = max(1, len(params) // _SAMPLES)
        self._samples = [param for param in params[::every] if param.numel()][:_SAMPLES]
        self._passes = self._usual = self._changes = 0
        self._last: Any = None

    def pass_begins(self) -> bool:
        """Whether to look at the weights."""
        self._passes += 1
        return self._passes > self._usual

    def step_ends(self) -> None:
        """An optimizer has stepped."""
        if self._passes > self._usual:
            self._usual = self._passes
        self._passes = self._changes = 0
        self._last = None

    def look(self) -> int:
        """How often the weights have changed since the last step; 0 below the threshold."""
        values = [param.detach().reshape(-1)[:_VALUES].tolist() for param in self._samples]
        now = (sum(map(_version_of, self._params)), values)
        self._changes += self._last is not None and now != self._last
        self._last = now
        return self._changes if self._changes >= _CHANGES else 0

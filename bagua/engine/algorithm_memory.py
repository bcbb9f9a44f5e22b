"""What an algorithm and its exchanges keep between launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bagua.algorithms.base import Bucket
from bagua.engine.state_dict import States
from bagua.engine.stats import Series
from bagua.exchanges import Exchange

__all__ = ["AlgorithmMemory"]


class AlgorithmMemory:
    """Tensors and objects of the algorithm that is bound.

    Args:
        adopt: called with each new tensor, before a lane uses it.

    Attributes:
        states: of exchanges, by exchange, bucket and part of the bucket; saved.
        held: by exchanges of two phases, from one to the other, in the same way; not saved.
        tensors: of the algorithm, by name and bucket; saved.
        series: values reported to `bagua.stats`.
    """

    def __init__(self, adopt: Callable[[Tensor], None]) -> None:
        self.states: States = {}
        self.held: States = {}
        self.tensors: dict[tuple[str, int], Tensor] = {}
        self.series: dict[str, Series] = {}
        self._scratch: dict[tuple[str, int], Tensor] = {}
        self._objects: dict[str, Any] = {}
        self._adopt = adopt

    @property
    def exchanges(self) -> set[Exchange]:
        """Those that were prepared."""
        return {exchange for exchange, _, _ in self.states}

    @property
    def keeps_state(self) -> bool:
        """Whether tensors are kept between steps."""
        return bool(self.tensors) or any(self.states.values())

    def all_tensors(self) -> Iterator[Tensor]:
        """Every tensor that lanes use."""
        yield from self.tensors.values()
        yield from self._scratch.values()
        for state in self.states.values():
            yield from state.values()

    def tensor(self, name: str, bucket: Bucket, like: Tensor | None = None) -> Tensor:
        """Return a named tensor of a bucket that is saved; made on first use."""
        key = (name, bucket.index)
        if key not in self.tensors:
            self.tensors[key] = torch.zeros_like(bucket.flat) if like is None else like.detach().clone()
            self._adopt(self.tensors[key])
        return self.tensors[key]

    def scratch(self, name: str, bucket: Bucket) -> Tensor:
        """Return a named tensor of a bucket that is not saved; made on first use."""
        key = (name, bucket.index)
        if key not in self._scratch:
            self._scratch[key] = torch.empty_like(bucket.flat)
            self._adopt(self._scratch[key])
        return self._scratch[key]

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Return an object of the algorithm; made on first use."""
        if name not in self._objects:
            self._objects[name] = make()
        return self._objects[name]

    def report(self, name: str, value: float) -> None:
        """Add a value to a series."""
        self.series[name] = self.series.get(name, Series()).plus(value)

    def forget_tensors(self) -> None:
        """Drop everything that belongs to the buckets."""
        self.states.clear()
        self.held.clear()
        self.tensors.clear()
        self._scratch.clear()

    def forget_objects(self) -> None:
        """Drop the algorithm's objects."""
        self._objects.clear()

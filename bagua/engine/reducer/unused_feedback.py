"""Preserves what is kept of parameters that no rank used in a pass: error feedback and momenta."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from bagua.comm.groups import Groups
from bagua.engine.algorithm_memory import AlgorithmMemory
from bagua.engine.lanes.dispatcher import Dispatcher
from bagua.engine.reducer.bucket import Bucket

__all__ = ["Withheld"]


class Withheld:
    """Copies of what exchanges and the algorithm keep of some parameters, from before a pass.

    A bucket is launched before it is known whether another rank used the parameters that this one misses. If none did,
    the result is discarded, and the residuals or momenta that went into it must be restored. An exchange tells what it
    keeps (`Exchange.memory`); of an algorithm these are its tensors with one element for each one of the bucket.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[tuple[Tensor, Tensor]]] = {}

    @torch.no_grad()
    def hold(
        self,
        memory: AlgorithmMemory,
        dispatcher: Dispatcher,
        groups: Groups,
        buckets: Sequence[Bucket],
        names: Collection[str],
    ) -> None:
        """Copy what is kept of the parameters `names`. Nothing may be in progress in their buckets."""
        self._held.clear()
        if not memory.keeps_state:
            return
        wanted = {bucket.index: list(_ranges(bucket, names)) for bucket in buckets}
        sizes = {bucket.index: bucket.numel for bucket in buckets}
        for (_, index), tensor in memory.tensors.items():
            for name, a, b in wanted[index] if tensor.numel() == sizes[index] and tensor.is_contiguous() else ():
                self._keep(name, tensor.view(-1)[a:b])
        for (exchange, index, part), state in memory.states.items():
            if state and wanted[index]:
                lo, hi = dispatcher.parts(exchange, index)[part]
                for name, a, b in wanted[index]:
                    if a < hi and lo < b:
                        for view in exchange.memory(state, hi - lo, max(a, lo) - lo, min(b, hi) - lo, groups):
                            self._keep(name, view)

    @torch.no_grad()
    def put_back(self, names: Iterable[str]) -> None:
        """Restore what was kept of the parameters `names`; let go of the rest."""
        for name in names:
            for view, copy in self._held.get(name, ()):
                view.copy_(copy)
        self._held.clear()

    def _keep(self, name: str, view: Tensor) -> None:
        self._held.setdefault(name, []).append((view, view.clone()))


def _ranges(bucket: Bucket, names: Collection[str]) -> Sequence[tuple[str, int, int]]:
    """Where each of `names` lies in the bucket."""
    found: list[tuple[str, int, int]] = []
    at = 0
    for name, param in zip(bucket.names, bucket.params, strict=True):
        if name in names:
            found.append((name, at, at + param.numel()))
        at += param.numel()
    return found

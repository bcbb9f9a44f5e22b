"""The original's name for `bagua.algorithms.AsyncModelAverage`."""

from __future__ import annotations

from typing import Any

from torch import nn

import bagua.algorithms
from bagua.engine.distributed_module import pause, resume
from bagua.gone import Gone
from bagua.torch_api.algorithms.base import Algorithm, GlobalAlgorithmRegistry

__all__ = ["AsyncModelAverageAlgorithm", "AsyncModelAverageAlgorithmImpl"]


class AsyncModelAverageAlgorithm(Algorithm):
    """Every rank trains on its own while weights are averaged in the background.

    Args:
        peer_selection_mode: "all", the only one.
        sync_interval_ms: pause between two rounds of averaging; 0 averages without pause.
        warmup_steps: training steps of gradient all-reduce before that.

    Raises:
        ValueError: an argument is wrong.

    Differs: see `bagua.algorithms.AsyncModelAverage`; above all `abort` and `resume` are not barriers.
    """

    def __init__(self, peer_selection_mode: str = "all", sync_interval_ms: int = 500, warmup_steps: int = 0) -> None:
        if peer_selection_mode != "all":
            raise ValueError(f"peer_selection_mode: expected 'all', got {peer_selection_mode!r}")
        self.peer_selection_mode = peer_selection_mode
        self.sync_interval_ms, self.warmup_steps = sync_interval_ms, warmup_steps
        self._core = bagua.algorithms.get(
            "async", sync_interval_ms=sync_interval_ms, warmup_steps=warmup_steps, codec="identity"
        )

    @property
    def core(self) -> bagua.algorithms.Algorithm:
        """`bagua.algorithms.AsyncModelAverage` with the same options."""
        return self._core

    def abort(self, bagua_module: nn.Module) -> None:
        """Stop averaging in the background; see `bagua.pause`. Waits for no other rank."""
        pause(_distributed(bagua_module))

    def resume(self, bagua_module: nn.Module) -> None:
        """Start averaging again after `abort`; no effect otherwise."""
        resume(_distributed(bagua_module))


def _distributed(module: Any) -> nn.Module:
    # Not at the top: the wrapper imports algorithms.
    from bagua.torch_api.data_parallel.distributed import DistributedDataParallel

    return module.module if isinstance(module, DistributedDataParallel) else module


_INSTEAD = "derive from AlgorithmImpl, or write a bagua.Algorithm"
AsyncModelAverageAlgorithmImpl = Gone("AsyncModelAverageAlgorithmImpl", _INSTEAD)

GlobalAlgorithmRegistry.register(
    "async", AsyncModelAverageAlgorithm, "local gradients; weights averaged in the background"
)

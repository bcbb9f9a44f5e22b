"""The original's names for `bagua.algorithms.Decentralized` and `LowPrecisionDecentralized`."""

from __future__ import annotations

import bagua.algorithms
from bagua.gone import Gone
from bagua.torch_api.algorithms.base import Algorithm, GlobalAlgorithmRegistry

__all__ = [
    "DecentralizedAlgorithm",
    "DecentralizedAlgorithmImpl",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
]


class DecentralizedAlgorithm(Algorithm):
    """Weights are averaged with peers during the step, gradients stay local.

    Args:
        hierarchical: exact average within each node, peers are nodes.
        peer_selection_mode: "all" or "shift_one"; any number of ranks works with either.
        communication_interval: steps between two averages.
    """

    def __init__(
        self, hierarchical: bool = True, peer_selection_mode: str = "all", communication_interval: int = 1
    ) -> None:
        self.hierarchical, self.peer_selection_mode = hierarchical, peer_selection_mode
        self.communication_interval = communication_interval
        self._core = bagua.algorithms.get(
            "decentralized",
            hierarchical=hierarchical,
            peer_selection_mode=peer_selection_mode,
            communication_interval=communication_interval,
        )

    @property
    def core(self) -> bagua.algorithms.Algorithm:
        """`bagua.algorithms.Decentralized` with the same options."""
        return self._core


class LowPrecisionDecentralizedAlgorithm(Algorithm):
    """local gradients; 8-bit weight differences exchanged with both ring neighbours, after each step.

    Args:
        hierarchical: exact average within each node, the ring joins nodes.
        communication_interval: gossip after the first step and every so many from there.
    """

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        self.hierarchical, self.communication_interval = hierarchical, communication_interval
        self._core = bagua.algorithms.get(
            "low_precision_decentralized", hierarchical=hierarchical, communication_interval=communication_interval
        )

    @property
    def core(self) -> bagua.algorithms.Algorithm:
        """`bagua.algorithms.LowPrecisionDecentralized` with the same options."""
        return self._core


_INSTEAD = "derive from AlgorithmImpl, or write a bagua.Algorithm"
DecentralizedAlgorithmImpl = Gone("DecentralizedAlgorithmImpl", _INSTEAD)
LowPrecisionDecentralizedAlgorithmImpl = Gone("LowPrecisionDecentralizedAlgorithmImpl", _INSTEAD)

GlobalAlgorithmRegistry.register(
    "decentralized", DecentralizedAlgorithm, "local gradients; weights averaged with peers"
)
GlobalAlgorithmRegistry.register(
    "low_precision_decentralized",
    LowPrecisionDecentralizedAlgorithm,
    "local gradients; 8-bit weight differences exchanged on a ring",
)

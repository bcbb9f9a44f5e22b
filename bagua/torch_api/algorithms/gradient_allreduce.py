"""The original's name for `bagua.algorithms.GradientAllReduce`."""

from __future__ import annotations

import bagua.algorithms
from bagua.torch_api.algorithms.base import Algorithm, GlobalAlgorithmRegistry

__all__ = ["GradientAllReduceAlgorithm"]


class GradientAllReduceAlgorithm(Algorithm):
    """Every rank steps with the mean of all gradients.

    Args:
        hierarchical: reduce within each node first, then among the nodes' first ranks.
        average: mean if true, else sum.
    """

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical, self.average = hierarchical, average
        self._core = bagua.algorithms.get("gradient_allreduce", hierarchical=hierarchical, average=average)

    @property
    def core(self) -> bagua.algorithms.Algorithm:
        """`bagua.algorithms.GradientAllReduce` with the same options."""
        return self._core


GlobalAlgorithmRegistry.register(
    "gradient_allreduce", GradientAllReduceAlgorithm, "gradients averaged in full precision"
)

"""The original's name for `bagua.algorithms.ByteGrad`."""

from __future__ import annotations

import bagua.algorithms
from bagua.torch_api.algorithms.base import Algorithm, GlobalAlgorithmRegistry

__all__ = ["ByteGradAlgorithm"]


class ByteGradAlgorithm(Algorithm):
    """Every rank steps with the same 8-bit approximation of the mean gradient.

    Args:
        hierarchical: full precision within each node, 8 bits between nodes; on one node nothing is compressed
            then, which the log says.
        average: mean if true, else sum.
    """

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        self.hierarchical, self.average = hierarchical, average
        self._core = bagua.algorithms.get("bytegrad", hierarchical=hierarchical, average=average)

    @property
    def core(self) -> bagua.algorithms.Algorithm:
        """`bagua.algorithms.ByteGrad` with the same options."""
        return self._core


GlobalAlgorithmRegistry.register("bytegrad", ByteGradAlgorithm, "gradients averaged in 8 bits")

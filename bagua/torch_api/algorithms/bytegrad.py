"""The original's name for `bagua.algorithms.ByteGrad`."""

from __future__ import annotations

from typing import Any

import bagua.algorithms
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["ByteGradAlgorithm", "ByteGradAlgorithmImpl"]


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


class ByteGradAlgorithmImpl(AlgorithmImpl):
    """The same as an `AlgorithmImpl`, for scripts that derive from it. The engine runs the algorithm without.

    Args:
        process_group: the ranks.
        hierarchical, average: as for `ByteGradAlgorithm`.
    """

    def __init__(self, process_group: Any, hierarchical: bool = True, average: bool = True) -> None:
        super().__init__(process_group)
        self.hierarchical, self.average = hierarchical, average

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        """Scatter, average and gather in 8 bits."""
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(
            self.hierarchical, self.average, scattergather=True, compression="MinMaxUInt8", group=self.process_group
        )


GlobalAlgorithmRegistry.register("bytegrad", ByteGradAlgorithm, "gradients averaged in 8 bits")

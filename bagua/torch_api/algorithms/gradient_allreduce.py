"""The original's name for `bagua.algorithms.GradientAllReduce`."""

from __future__ import annotations

from typing import Any

import bagua.algorithms
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry
from bagua.torch_api.bucket import BaguaBucket

__all__ = ["GradientAllReduceAlgorithm", "GradientAllReduceAlgorithmImpl"]


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


class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    """The same as an `AlgorithmImpl`, for scripts that derive from it. The engine runs the algorithm without.

    Args:
        process_group: the ranks.
        hierarchical, average: as for `GradientAllReduceAlgorithm`.
    """

    def __init__(self, process_group: Any, hierarchical: bool = False, average: bool = True) -> None:
        super().__init__(process_group)
        self.hierarchical, self.average = hierarchical, average

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        """An all-reduce."""
        bucket.clear_ops()
        bucket.append_centralized_synchronous_op(self.hierarchical, self.average, group=self.process_group)


GlobalAlgorithmRegistry.register(
    "gradient_allreduce", GradientAllReduceAlgorithm, "gradients averaged in full precision"
)

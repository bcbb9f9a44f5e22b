"""The original's names for `bagua.algorithms.QAdam` and `bagua.optim.QAdam`."""

from __future__ import annotations

import bagua.algorithms
from bagua.gone import Gone
from bagua.optim import QAdam as QAdamOptimizer
from bagua.torch_api.algorithms.base import Algorithm, GlobalAlgorithmRegistry

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"]


class QAdamAlgorithm(Algorithm):
    """Adam whose workers average 8-bit momenta once the optimizer's warm-up is over.

    Args:
        q_adam_optimizer: the optimizer that is also given to `with_bagua`.
        hierarchical: full precision within each node, 8 bits between nodes; on one node nothing is compressed
            then, which the log says.

    Raises:
        TypeError: another optimizer.
    """

    def __init__(self, q_adam_optimizer: QAdamOptimizer, hierarchical: bool = True) -> None:
        if not isinstance(q_adam_optimizer, QAdamOptimizer):
            raise TypeError(f"q_adam_optimizer: expected a QAdamOptimizer, got {type(q_adam_optimizer).__name__}")
        self.optimizer, self.hierarchical = q_adam_optimizer, hierarchical
        self._core = bagua.algorithms.get("qadam", hierarchical=hierarchical)

    @property
    def warmup_steps(self) -> int | str:
        """The optimizer's: a number, or "auto"."""
        return self.optimizer.warmup_steps

    @property
    def core(self) -> bagua.algorithms.Algorithm:
        """`bagua.algorithms.QAdam` with the same options."""
        return self._core


_INSTEAD = "derive from AlgorithmImpl, or write a bagua.Algorithm"
QAdamAlgorithmImpl = Gone("QAdamAlgorithmImpl", _INSTEAD)

GlobalAlgorithmRegistry.register("qadam", QAdamAlgorithm, "Adam with momenta averaged in 8 bits after a warm-up")

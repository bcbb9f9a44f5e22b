"""1-bit LAMB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.qadam import MomentumAverage
from bagua.algorithms.registry import register
from bagua.optim import OneBitLamb as OneBitLambOptimizer
from bagua.optim import TwoStage

__all__ = ["OneBitLamb"]


@register
@dataclass(frozen=True)
class OneBitLamb(MomentumAverage):
    """LAMB whose workers average 8-bit (or 1-bit) momenta after a warm-up. Needs `bagua.optim.OneBitLamb`.

    The exchange is that of `QAdam`. The gradient that the optimizer gets, (m_new - b1 m) / (1 - b1), is the
    paper's reconstructed gradient, with which it makes LAMB's step, or follows the second moment and adapts each
    layer's scaling (`fixed_scaling`, the paper's method).

    Args:
        hierarchical: full precision within a node, quantised between nodes. None (default) does so where it has
            an effect, that is with several nodes of which one has several ranks; between sites a
            start-up benchmark decides.
        codec: the codec of the momenta: "minmax_uint8" by default, which was level with LAMB wherever it was measured;
            "sign", the paper's, for 1 bit, which was not (docs/algorithms/one_bit_lamb.md).
        error_feedback: add the compression error of one step to the next. None (default) does so for codecs with less
            than 8 bits per element and "top_k", which do not converge without: `eden` too, unlike with gradients.

    Bytes: after the warm-up about 2 (R-1)/R bytes per element sent with 8 bits, 2 (R-1)/(8 R) with 1 bit; an all-reduce
        in fp32 before.
    Source: arXiv:2104.06069 (1-bit LAMB), algorithm 2.
    Differs: the default of `codec`; for the step see `bagua.optim.OneBitLamb`.

    Examples:
        >>> optimizer = bagua.optim.OneBitLamb(model.parameters(), warmup_steps=200)
        >>> model = bagua.distribute(model, optimizer, bagua.algorithms.OneBitLamb(codec="sign"))
    """

    name: ClassVar[str] = "one_bit_lamb"
    summary: ClassVar[str] = "LAMB with momenta averaged in 8 bits (or 1) after a warm-up"
    optimizer_class: ClassVar[type[TwoStage]] = OneBitLambOptimizer

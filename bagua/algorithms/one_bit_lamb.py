"""1-bit LAMB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.qadam import MomentumAverage
from bagua.algorithms.registry import register
from bagua.codecs import Codec
from bagua.optim import OneBitLamb as OneBitLambOptimizer
from bagua.optim import TwoStage

__all__ = ["OneBitLamb"]


@register
@dataclass(frozen=True)
class OneBitLamb(MomentumAverage):
    """LAMB whose workers average 1-bit momenta after a warm-up. Needs the optimizer `bagua.optim.OneBitLamb`.

    The exchange is that of `QAdam`. The gradient that the optimizer gets, (m_new - b1 m) / (1 - b1), is the
    paper's reconstructed gradient, from which it follows the second moment and adapts each layer's scaling.

    Args:
        hierarchical: full precision within a node, quantised between nodes. None (default) does so where it has
            an effect, that is with several nodes of which one has several ranks.
        codec: the codec of the momenta; "sign" by default, "minmax_uint8" for 8 bits.
        error_feedback: add the compression error of one step to the next. None (default) does so for codecs with less
            than 8 bits per element, which do not converge without: `eden` too, unlike with gradients.

    Bytes: after the warm-up about 2 (R-1)/(8 R) bytes per element sent; an all-reduce in fp32 before.
    Source: arXiv:2104.06069 (1-bit LAMB), algorithm 2.
    Differs: see `bagua.optim.OneBitLamb`.

    Examples:
        >>> optimizer = bagua.optim.OneBitLamb(model.parameters(), warmup_steps=200)
        >>> model = bagua.distribute(model, optimizer, bagua.algorithms.OneBitLamb(codec="int4"))
    """

    name: ClassVar[str] = "one_bit_lamb"
    summary: ClassVar[str] = "LAMB with momenta averaged in 1 bit after a warm-up"
    optimizer_class: ClassVar[type[TwoStage]] = OneBitLambOptimizer

    codec: str | Codec = "sign"

"""int4: four bits per element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.codecs.blocks import BlockCodec
from bagua.codecs.int4_torch import LAYOUT
from bagua.codecs.layout import Layout

__all__ = ["Int4"]


@dataclass(frozen=True)
class Int4(BlockCodec):
    """4 bits per element: fifteen levels between minus and plus the largest magnitude of each block.

    With absmax = max |x| of the block: q = rint(x * (7 / absmax)), half to even, x' = (q * (1/7)) * absmax, in
    fp32. The error is at most half a step, absmax / 14; zeros and the largest elements are exact. A block that
    holds a NaN or an infinity decodes to NaN everywhere, so that a gradient scaler sees it. Of a Gaussian row
    about 0.12 of the norm is lost: meant for use with error feedback.

    A header is absmax as fp32; then follow the codes, two to a byte, in two's complement. In a block of m
    elements byte j holds element j in its low nibble and element ceil(m / 2) + j in its high one (0 if there
    is none); zeros pad the row.

    Args:
        block: elements of a block, positive and even; smaller costs bytes and gains accuracy.

    Bytes:
        `4 * ceil(n / block) + ceil(n / 2)`, padded to a multiple of 4.

    Source:
        Blockwise absmax quantisation as in arXiv:2110.02861, section 2.1, with linear levels.

    Examples:
        >>> codec = bagua.codecs.Int4(block=128)
        >>> wire = codec.encode(inputs)
        >>> decoded = codec.decode(wire, inputs.shape[1])
    """

    name: ClassVar[str] = "int4"
    layout: ClassVar[Layout] = LAYOUT

    block: int = 128

    def __post_init__(self) -> None:
        """Raise ValueError unless `block` is positive and even."""
        if type(self.block) is not int or self.block < 1 or self.block % 2:
            raise ValueError(f"block must be a positive multiple of 2, got {self.block!r}")

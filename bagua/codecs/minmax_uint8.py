"""minmax_uint8: 8-bit linear quantisation between the minimum and the maximum of each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.codecs.blocks import BlockCodec
from bagua.codecs.layout import Layout
from bagua.codecs.minmax_torch import LAYOUT

__all__ = ["MinMaxUInt8"]


@dataclass(frozen=True)
class MinMaxUInt8(BlockCodec):
    """8 bits per element: linear levels between the minimum and the maximum of each block.

    With range = max - min: q = rint((x - min) * (255 / range)), x' = min + q * (range / 255), in fp32 (fp64
    rows go through fp32). The error is at most half a step, range / 510. A constant block is exact. A block
    that holds a NaN or an infinity, or whose range overflows fp32, decodes to NaN everywhere, so that a
    gradient scaler sees it. The header is (min, max) as fp32 for each block, then follow the codes; zeros pad
    the row.

    Args:
        block: elements of a block; smaller costs bytes and gains accuracy. None: the whole row is one block.

    Bytes:
        `n + 8 * ceil(n / block)`, padded to a multiple of 4.

    Source:
        ByteGrad's MinMaxUInt8 of Bagua 0.9 (arXiv:2107.01499, section 3.3), which has one range
        for a whole chunk; ranges for blocks as in QSGD's buckets (arXiv:1610.02132, section 4).

    Differs:
        from Bagua 0.9 in the header (once for each block, no padding to 32 bytes), in rounding x - min
        instead of x and min apart, and in that NaN and infinities are kept visible.

    Examples:
        >>> codec = bagua.codecs.MinMaxUInt8(block=1024)
        >>> wire = codec.encode(inputs)
        >>> decoded = codec.decode(wire, inputs.shape[1])
    """

    name: ClassVar[str] = "minmax_uint8"
    layout: ClassVar[Layout] = LAYOUT

    block: int | None = 1024

    def __post_init__(self) -> None:
        """Raise ValueError unless `block` is a positive int or None."""
        if self.block is not None and (type(self.block) is not int or self.block < 1):
            raise ValueError(f"block must be a positive int or None (the whole row), got {self.block!r}")

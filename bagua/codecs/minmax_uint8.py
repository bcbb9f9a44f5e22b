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

    With range = hi - lo: q = rint((x - lo) * (255 / range)), x' = lo + q * (range / 255), in fp32 (fp64 rows go
    through fp32). lo and hi are the minimum and the maximum, or, where zero lies between, a little beyond them, so that
    zero is a level: the step is 1/254 of their distance, rounded up to 16 binary digits, and lo a multiple of it. So
    elements that are 0 stay 0, in means, too: a parameter that nobody uses does not move, whatever shares its block.
    The error is at most half a step, 1/508 of the distance. A constant block is exact. A block
    that holds a NaN or an infinity, or whose range overflows fp32, decodes to NaN everywhere, so that a
    gradient scaler sees it. The header is (lo, hi) as fp32 for each block, then follow the codes; zeros pad
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
        Zeros stay zeros.

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

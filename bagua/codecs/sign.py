"""sign: one bit per element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.codecs.blocks import BlockCodec
from bagua.codecs.layout import Layout
from bagua.codecs.sign_torch import LAYOUT

__all__ = ["Sign"]


@dataclass(frozen=True)
class Sign(BlockCodec):
    """1 bit per element: its sign, and the mean magnitude of each block.

    x' = scale where the sign bit of x is clear and -scale where it is set (so for -0.0 too), with scale =
    mean |x| of the block. Among all x' of two values +-s that is the closest to x in the Euclidean norm, yet
    far from it: about 0.6 of the norm of a Gaussian row is lost. It is meant for use with error feedback,
    which sends the error later; without it, training is biased and may diverge.

    A block of zeros is exact (its scale is 0), as is one of equal magnitudes as far as their mean is. A block
    that holds a NaN or an infinity, or whose sum of magnitudes overflows fp32, decodes to NaN everywhere, so
    that a gradient scaler sees it. A header is the scale as fp32; then follow the bits, 1 = negative, element
    i of a row in bit i % 8 of byte i // 8; zeros pad the row. The magnitudes are added in fp32 in a fixed
    order: element i of a block goes to partial sum i % 64, and the 64 sums are folded in halves.

    Args:
        block: elements of a block, a positive multiple of 8; smaller costs bytes and gains accuracy where
            magnitudes differ along the row.

    Bytes:
        `4 * ceil(n / block) + ceil(n / 8)`, padded to a multiple of 4.

    Source:
        EF-signSGD (arXiv:1901.09847, algorithm 1: sign(p) * ||p||_1 / d), here for each block instead of each
        layer.

    Examples:
        >>> codec = bagua.codecs.Sign(block=2048)
        >>> wire = codec.encode(inputs)
        >>> decoded = codec.decode(wire, inputs.shape[1])
    """

    name: ClassVar[str] = "sign"
    keeps_zeros: ClassVar[bool] = False
    layout: ClassVar[Layout] = LAYOUT

    block: int = 2048

    def __post_init__(self) -> None:
        """Raise ValueError unless `block` is a positive multiple of 8."""
        if type(self.block) is not int or self.block < 1 or self.block % 8:
            raise ValueError(f"block must be a positive multiple of 8, got {self.block!r}")

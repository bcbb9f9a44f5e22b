"""EDEN: one to four bits per element of a randomly rotated block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bagua.codecs.blocks import BlockCodec
from bagua.codecs.eden_torch import BITS, LONGEST, layout_of
from bagua.codecs.layout import Layout
from bagua.codecs.trellis_torch import SHORTEST, TRELLISES

__all__ = ["Eden"]


@dataclass(frozen=True, repr=False)
class Eden(BlockCodec):
    """EDEN: rotates each block at random, and sends 1 to 4 bits per rotated element and an unbiased scale.

    With R = H D (D random signs, H the orthonormal Hadamard matrix), z = R x of a block and Q(z) the nearest
    centroids of a normal distribution (1 bit: the signs): x' = S R^T Q(z) with S = ||z||^2 / <z, Q(z)>. Over random
    rotations the mean of x' is x, nearly so unless very few elements make up a block's norm. Lost are about 0.76,
    0.36, 0.19 and 0.10 of the norm with 1, 2, 3 and 4 bits, however the elements are distributed. At 1 bit that is
    more than `sign` loses, but without its bias: eden is meant for use without error feedback, and the errors of
    ranks and steps average out.

    Codecs know neither step nor rank, and with a constant rotation errors would repeat at every step. So
    the seed of D is a hash of the bits of the block, 12 bits of it, and travels in the header: blocks, ranks and
    steps have rotations that are as good as independent, equal rows have equal wires.

    With `states` > 1, codes are the path of least squared error through a trellis (found by the algorithm of Viterbi):
    the centroid of an element depends on its own code and on those before it in the block. With the same bytes about
    0.66 (1 bit, 8 states), 0.64 (1 bit, 32 states) and 0.30 (2 bits, 8 states) of the norm are lost: squared, 0.77,
    0.72 and 0.68 times as much as without. Blocks of which all but a few elements are zero lose more than without.
    Encoding takes several times as long, see the guide.

    A block of zeros is exact. A block that holds a NaN or an infinity, or whose scale overflows fp32, decodes to NaN
    everywhere, so that a gradient scaler sees it. What is below 2^-113 or so decodes coarsely. A header is the scale,
    an fp32 whose mantissa is rounded to 11 bits, with the seed in the 12 bits that this frees; then follow the codes
    as planes of bits, of each block ceil(m / 8) bytes for the signs (1 = negative) and as many for each bit of the
    index of the centroid's magnitude, lowest first; with a trellis, one for each bit of a code, lowest first. A ragged
    last block is padded with zeros to m, the next power of two (with a trellis 8 at least), and all m rotated elements
    are sent. Sums are taken in 64 partial sums as those of `sign`.

    Args:
        bits: of an element, 1 to 4.
        block: elements of a block, a power of two from 8 to 4096; smaller costs bytes and gains accuracy where
            magnitudes differ along the row.
        states: of the trellis: 8 or 32 with 1 bit, 8 with 2 bits; 1: none. A trellis needs blocks of 32 or more.

    Bytes:
        `4 * ceil(n / block) + bits * ceil(n / 8)`, a ragged block counted as padded, and all padded to a multiple of
        4: 1.125 bytes for 8 elements by default.

    Source:
        DRIVE (arXiv:2105.08339, section 4: the scale) for 1 bit, EDEN (arXiv:2108.08842, section 3 and its
        centroids) for more. Trellis-coded quantisation: Marcellin and Fischer, IEEE Transactions on Communications 38
        (1990), with windows of codes as states as in QTIP (arXiv:2406.11235, section 3).

    Examples:
        >>> codec = bagua.codecs.Eden(bits=2)
        >>> wire = codec.encode(inputs)
        >>> decoded = codec.decode(wire, inputs.shape[1])
    """

    name: ClassVar[str] = "eden"
    unbiased: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = False

    block: int = 256
    bits: int = 1
    states: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError unless `bits` is 1 to 4, `block` a power of two from 8 to 4096 and `states` among those."""
        if type(self.block) is not int or not 8 <= self.block <= LONGEST or self.block & (self.block - 1):
            raise ValueError(f"block must be a positive power of two from 8 to {LONGEST}, got {self.block!r}")
        if type(self.bits) is not int or self.bits not in BITS:
            raise ValueError(f"bits must be 1, 2, 3 or 4, got {self.bits!r}")
        allowed = [1, *(states for bits, states in TRELLISES if bits == self.bits)]
        if type(self.states) is not int or self.states not in allowed:
            raise ValueError(f"states must be one of {allowed} with bits={self.bits}, got {self.states!r}")
        if self.states > 1 and self.block < SHORTEST:
            raise ValueError(f"block must be {SHORTEST} or more with states={self.states}, got {self.block}")

    def __repr__(self) -> str:
        """As of any dataclass, but without `states` if there is one: saved states from before this option fit."""
        states = f", states={self.states}" if self.states > 1 else ""
        return f"{type(self).__name__}(block={self.block}, bits={self.bits}{states})"

    @property
    def layout(self) -> Layout:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Sizes on the wire, and the name of the kernels."""
        return layout_of(self.bits, self.states, self.block)

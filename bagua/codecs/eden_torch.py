"""Eden kernels in eager torch: the reference, also used on other devices and without a compiler.

The compiled kernels do the same fp32 operations in the same order; change both or neither.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bagua.codecs.layout import Layout
from bagua.codecs.sign_torch import lane_sum, pack_bits
from bagua.codecs.trellis_torch import TRELLISES, trellis_of

__all__ = ["BITS", "LAYOUTS", "LONGEST", "EdenTorch", "factor", "layout_of", "padded"]

BITS = (1, 2, 3, 4)
LONGEST = 4096  # elements of a block
# The magnitudes of the Lloyd-Max centroids of a standard normal distribution with 1 to 4 bits. With 1 bit any number
# does: the scale makes up for it.
_CENTROIDS: tuple[Sequence[float], ...] = (
    (1.0,),
    (0.4527800346, 1.5104176085),
    (0.2450941789, 0.7560052812, 1.3439092785, 2.1519457045),
    (0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565, 1.2562311973, 1.6180463860, 2.0690172265, 2.7325895710),
)
# The squares of the numbers halfway between them.
_BOUNDARIES: tuple[Sequence[float], ...] = (
    (),
    (0.9635362466,),
    (0.2505500323, 1.1024102896, 3.0552505155),
    (0.0666784281, 0.2729056352, 0.6392798627, 1.2084293292, 2.0653679066, 3.3986095208, 5.7638569597),
)
_INFINITY, _NAN = 0x7F800000, 0x7FC00000
_SEED = 0xFFF  # the bits of a header that hold the seed


@dataclass(frozen=True)
class _Planes(Layout):
    """Codes are planes of bits: of each block whole bytes for each bit of an element. A ragged block is padded."""

    block: int
    least: int  # elements of a padded block

    def code_bytes(self, n: int) -> int:
        """Bytes of the codes of `n` elements that begin at a block."""
        rest = n % self.block
        return self.code_bits * ((n - rest) // 8 + (-(-padded(rest, self.least) // 8) if rest else 0))


def padded(n: int, least: int) -> int:
    """The least power of two from `n` and `least` on."""
    return max(least, 1 << (n - 1).bit_length())


@functools.cache
def layout_of(bits: int, states: int, block: int) -> _Planes:
    """The layout of a codec."""
    name = f"eden{bits}" if states == 1 else f"eden{bits}x{states}"
    return _Planes(name, header_bytes=4, code_bits=bits, block=block, least=1 if states == 1 else 8)


# Bits and states of the codecs, by the names of their layouts.
LAYOUTS = {layout_of(*each, 1).name: each for each in (*((bits, 1) for bits in BITS), *TRELLISES)}


class EdenTorch:
    """Encode and decode whole blocks (the last may be ragged) on any device, see `kernels.Kernels`.

    Args:
        bits: of an element.
        states: of the trellis; 1: none.
    """

    def __init__(self, bits: int, states: int) -> None:
        self._bits, self._states, self._trellis = bits, states, trellis_of(bits, states)
        self._boundaries = _BOUNDARIES[bits - 1]
        self._centroids = torch.tensor(_CENTROIDS[bits - 1], dtype=torch.float32, device="cpu")

    def encode(self, x_RC: Tensor, wire_RW: Tensor, head: int, codes: int, block: int) -> None:
        """Write the scale, the seed and the codes of each block."""
        layout = layout_of(self._bits, self._states, block)
        for header, x_RKB, codes_RKH in layout.blocks(x_RC, wire_RW, head, codes, block):
            size, word_RKB = x_RKB.shape[-1], x_RKB.view(torch.int32)
            most_RK1 = (word_RKB & 0x7FFFFFFF).amax(-1, keepdim=True)
            lost_RK1 = most_RK1 >= _INFINITY
            exponent_RK1 = ((most_RK1 >> 23) - 127).clamp_(-100, 120)
            seed_RK1 = _mix(word_RKB.sum(-1, keepdim=True, dtype=torch.int64)) >> 20
            z_RKB = _flip(x_RKB * _power(-exponent_RK1), seed_RK1)
            z_RKB = _hadamard(torch.nn.functional.pad(z_RKB, (0, padded(size, layout.least) - size)))
            square_RKB = z_RKB * z_RKB
            energy_RK1 = lane_sum(square_RKB)
            mean_RK1 = energy_RK1 / torch.full_like(energy_RK1, z_RKB.shape[-1])
            if self._trellis is None:
                level_RKB = torch.zeros(z_RKB.shape, dtype=torch.int32, device=x_RKB.device)
                for boundary in self._boundaries:
                    level_RKB += square_RKB > mean_RK1 * boundary
                planes = [z_RKB.signbit(), *(level_RKB >> bit & 1 != 0 for bit in range(self._bits - 1))]
                product_RKB = z_RKB.abs() * self._centroids.to(x_RKB.device)[level_RKB]
            else:
                # Rounded once each: torch's root of fp32 is not, and `4096 / x` is a reciprocal times 4096.
                unit_RK1 = torch.full_like(mean_RK1, 4096) / mean_RK1.double().sqrt().float()
                factor_RK1 = torch.where((mean_RK1 > 0) & ~lost_RK1, unit_RK1, 0.0)
                code_RKB = self._trellis.codes(torch.where(lost_RK1, 0.0, z_RKB * factor_RK1).flatten(0, 1))
                code_RKB = code_RKB.view(z_RKB.shape)
                planes = [code_RKB >> bit & 1 != 0 for bit in range(self._bits)]
                product_RKB = z_RKB * self._trellis.centroids(code_RKB)
            scale_RK1 = energy_RK1 / lane_sum(product_RKB)
            scale_RK1 = torch.where(energy_RK1 == 0, 0.0, scale_RK1) * _power(exponent_RK1)
            rounded_RK1 = (scale_RK1.view(torch.int32) + 0x800) & ~_SEED
            lost_RK1 |= ~scale_RK1.isfinite() | (rounded_RK1 >= _INFINITY)
            codes_RKH.copy_(torch.cat([pack_bits(plane & ~lost_RK1) for plane in planes], -1))
            word_RK1 = torch.where(lost_RK1, _NAN, rounded_RK1 | seed_RK1.to(torch.int32))
            header.copy_(word_RK1.view(torch.uint8).flatten(1))

    def decode(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor) -> None:
        """x' = S R^T Q(z)."""
        layout = layout_of(self._bits, self._states, block)
        for header, out_RKB, codes_RKH in layout.blocks(out_RC, wire_RW, head, codes, block):
            out_RKB.copy_(self._decoded(header, codes_RKH, out_RKB.shape[-1]))

    def decode_mean(self, wire_RW: Tensor, head: int, codes: int, block: int, weight: float, out_C: Tensor) -> None:
        """out = weight * sum of the decoded rows, in order."""
        layout = layout_of(self._bits, self._states, block)
        for header, out_1KB, codes_RKH in layout.blocks(out_C[None], wire_RW, head, codes, block):
            total_KB = out_1KB[0].zero_()
            for r in range(codes_RKH.shape[0]):
                total_KB.add_(self._decoded(header[r : r + 1], codes_RKH[r : r + 1], out_1KB.shape[-1])[0])
            total_KB.mul_(weight)

    def _decoded(self, header: Tensor, codes_RKH: Tensor, size: int) -> Tensor:
        word_RK1 = header.clone(memory_format=torch.contiguous_format).view(torch.int32)[..., None]
        at = torch.arange(8, dtype=torch.uint8, device=header.device)
        length = padded(size, layout_of(self._bits, self._states, 1).least)
        planes = [(plane[..., None] >> at & 1).flatten(-2)[..., :length] for plane in codes_RKH.chunk(self._bits, -1)]
        code_RKB = torch.zeros(planes[0].shape, dtype=torch.int32, device=header.device)
        for bit, plane in enumerate(planes):
            code_RKB |= plane.to(torch.int32) << bit
        if self._trellis is None:
            chosen_RKB = self._centroids.to(header.device)[code_RKB >> 1]
            z_RKB = torch.where(planes[0] != 0, -chosen_RKB, chosen_RKB)
        else:
            z_RKB = self._trellis.centroids(code_RKB)
        z_RKB = _hadamard(z_RKB)[..., :size]
        return _flip(z_RKB * (word_RK1 & ~_SEED).view(torch.float32), (word_RK1 & _SEED).to(torch.int64))


def _power(exponent: Tensor) -> Tensor:
    """2 to each of int32 exponents in -126..127, exactly."""
    return ((exponent + 127) << 23).view(torch.float32)


def _mix(h: Tensor) -> Tensor:
    """A hash of 32 bits of int64, in 0..2^32 - 1."""
    h = h & 0xFFFFFFFF
    h = ((h ^ h >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    h = ((h ^ h >> 15) * 0x5E8B4D35) & 0xFFFFFFFF
    return h ^ h >> 16


def _flip(x_RKB: Tensor, seed_RK1: Tensor) -> Tensor:
    """The random signs of a seed: bit i % 32 of the hash of (seed, i // 32) belongs to element i."""
    size = x_RKB.shape[-1]
    word_RKw = _mix(seed_RK1 << 16 | torch.arange(-(-size // 32), device=x_RKB.device))
    bit = torch.arange(32, device=x_RKB.device)
    negative_RKB = (word_RKw[..., None] >> bit & 1).flatten(-2)[..., :size] != 0
    return torch.where(negative_RKB, -x_RKB, x_RKB)


def _hadamard(x_RKP: Tensor) -> Tensor:
    """Times the orthonormal Hadamard matrix: sums and differences of elements P / 2, ..., 1 apart."""
    size = x_RKP.shape[-1]
    half = size // 2
    while half:
        a_RKph, b_RKph = x_RKP.unflatten(-1, (-1, 2, half)).unbind(-2)
        x_RKP = torch.stack((a_RKph + b_RKph, a_RKph - b_RKph), -2).flatten(-3)
        half //= 2
    return x_RKP * factor(size)


@functools.cache
def factor(size: int) -> float:
    """What sums and differences are multiplied by in a rotation of a power of two elements, an fp32."""
    return torch.tensor(size**-0.5, dtype=torch.float32, device="cpu").item()

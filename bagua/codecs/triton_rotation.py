"""Randomized Hadamard rotations in Triton, of tiles [K, P]; see eden_torch.py for what is computed."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["flip", "hadamard", "mix"]


@triton.jit
def mix(h):
    """A hash of uint32."""
    h = (h ^ (h >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    h = (h ^ (h >> 15)) * tl.full([], 0x5E8B4D35, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def flip(x_KP, seed_K, at_P):
    """The random signs of a seed, given as uint32."""
    at_1P = at_P[None, :].to(tl.uint32)
    word_KP = mix((seed_K[:, None] << 16) | (at_1P >> 5))
    negative_KP = ((word_KP >> (at_1P & 31)) & 1) << 31
    return (x_KP.to(tl.uint32, bitcast=True) ^ negative_KP).to(tl.float32, bitcast=True)


@triton.jit
def _butterfly(x_KP, size_K, K: tl.constexpr, P: tl.constexpr, HALF: tl.constexpr):
    """Sums and differences of elements HALF apart, in blocks that are longer."""
    word_KG2H = tl.reshape(x_KP, (K, P // (2 * HALF), 2, HALF)).to(tl.int32, bitcast=True)
    second = (tl.arange(0, 2) == 1)[None, None, :, None]
    # As integers, whose sum with 0 keeps the sign of -0.
    a = tl.sum(tl.where(second, 0, word_KG2H), 2, keep_dims=True).to(tl.float32, bitcast=True)
    b = tl.sum(tl.where(second, word_KG2H, 0), 2, keep_dims=True).to(tl.float32, bitcast=True)
    active = size_K[:, None] >= 2 * HALF
    return tl.where(active, tl.reshape(tl.where(second, a - b, a + b), (K, P)), x_KP)


@triton.jit
def hadamard(x_KP, size_K, factor_K, K: tl.constexpr, P: tl.constexpr, STAGES: tl.constexpr):
    """Times the orthonormal Hadamard matrix of the padded size."""
    for stage in tl.static_range(STAGES):
        x_KP = _butterfly(x_KP, size_K, K, P, P >> (stage + 1))
    return x_KP * factor_K[:, None]

"""Helpers of the Triton kernels.

A program handles the same K blocks of one row; a tile is [K, B] elements with B a power of two. All do the same fp32
operations in the same order as the other backends; they are launched without fused multiply-add.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["DOWN", "HUGE", "INFINITY_BITS", "MAGIC", "MAGIC_BITS", "MOST", "UP", "is_finite", "rounded"]

UP = tl.constexpr(2.0**100)
DOWN = tl.constexpr(2.0**-100)  # below it 255 / range and 7 / absmax may overflow
HUGE = tl.constexpr(2.0**126)
MOST = tl.constexpr(3.4028234663852886e38)
INFINITY_BITS = tl.constexpr(0x7F800000)
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: the last place is worth 1
MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def rounded(a):
    """Integers of -255..255, half to even."""
    return (a + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS


@triton.jit
def is_finite(a):
    """Whether a number is neither infinite nor NaN."""
    return (a.to(tl.int32, bitcast=True) & INFINITY_BITS) != INFINITY_BITS

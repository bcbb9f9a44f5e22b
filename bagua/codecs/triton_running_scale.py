"""Running scales in Triton; see `bagua.exchanges.running_scale` for what is computed. A row of a tile is a window."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from bagua.codecs.triton_common import is_finite

__all__ = ["divide", "means", "multiply"]

_W = tl.constexpr(256)  # elements of a window
_HALF_OF_ONE = tl.constexpr(0x3F800000 >> 1)  # of the bits of 1.0
_DECAY_LEFT = tl.constexpr(0.01)
_MOST = tl.constexpr(1e30)


@triton.jit
def _windows(n, K: tl.constexpr):
    """Windows of this program, those that there are, elements, and those that there are."""
    k_K = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    at_KW = k_K[:, None] * _W + tl.arange(0, _W)[None, :]
    return k_K, k_K * _W < n, at_KW, at_KW < n


@triton.jit
def _scale(magnitude_KW, floor_K):
    word_KW = (magnitude_KW + floor_K[:, None]).to(tl.int32, bitcast=True)
    return ((word_KW >> 1) + _HALF_OF_ONE).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["n"])
def means(magnitude, to, n, of_rest, factor, K: tl.constexpr):
    """The mean of each window times `factor`; that of the ragged one times `of_rest`, too. Halves added to halves."""
    k_K, in_K, at_KW, in_KW = _windows(n, K)
    a = tl.load(magnitude + at_KW, in_KW, 0.0)
    a = tl.sum(tl.reshape(a, (K, 2, 128)), axis=1)
    a = tl.sum(tl.reshape(a, (K, 2, 64)), axis=1)
    a = tl.sum(tl.reshape(a, (K, 2, 32)), axis=1)
    a = tl.sum(tl.reshape(a, (K, 2, 16)), axis=1)
    a = tl.sum(tl.reshape(a, (K, 2, 8)), axis=1)
    a = tl.sum(tl.reshape(a, (K, 2, 4)), axis=1)
    a = tl.sum(tl.reshape(a, (K, 2, 2)), axis=1)
    a = tl.sum(a, axis=1)
    a = tl.where((k_K + 1) * _W > n, a * of_rest, a)
    tl.store(to + k_K, a * factor, in_K)


@triton.jit(do_not_specialize=["n"])
def divide(magnitude, floors, most, x, n, K: tl.constexpr):
    """Divide by the scales. `floors` are means, and what is added to magnitudes afterwards."""
    k_K, in_K, at_KW, in_KW = _windows(n, K)
    mean_K, largest = tl.load(floors + k_K, in_K, 1.0), tl.load(most)
    floor_K = tl.where(mean_K > 0, mean_K, tl.where(largest > 0, largest, 1.0))
    scale_KW = _scale(tl.load(magnitude + at_KW, in_KW, 0.0), floor_K)
    tl.store(x + at_KW, tl.div_rn(tl.load(x + at_KW, in_KW, 0.0), scale_KW), in_KW)
    tl.debug_barrier()  # all threads have read the means
    tl.store(floors + k_K, floor_K, in_K)


@triton.jit(do_not_specialize=["n"])
def multiply(magnitude, floors, x, n, K: tl.constexpr):
    """Multiply by the scales, and move the running means of the magnitudes."""
    k_K, in_K, at_KW, in_KW = _windows(n, K)
    before_KW = tl.load(magnitude + at_KW, in_KW, 0.0)
    y_KW = tl.load(x + at_KW, in_KW, 0.0) * _scale(before_KW, tl.load(floors + k_K, in_K, 1.0))
    tl.store(x + at_KW, y_KW, in_KW)
    size_KW = (y_KW.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    change_KW = (size_KW - before_KW) * _DECAY_LEFT
    change_KW = tl.where(is_finite(change_KW), change_KW, 0.0)
    tl.store(magnitude + at_KW, tl.minimum(before_KW + change_KW, _MOST), in_KW)

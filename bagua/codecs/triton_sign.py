"""Sign in Triton; see sign_torch.py for what is computed. A step handles 64 elements of each block."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from bagua.codecs.triton_common import is_finite

__all__ = ["decode", "encode"]

_L = tl.constexpr(64)  # partial sums


@triton.jit
def _signed(scale, negative):
    # Triton's minus is 0 - x, which makes 0 of 0, not -0.
    return scale * tl.where(negative, -1.0, 1.0)


@triton.jit
def _row(wire8, wire32, head_K, codes_KL, at_L, mask_K, mask_KL):
    scale_K = tl.load(wire32 + head_K, mask_K, 0.0)
    byte_KL = tl.load(wire8 + codes_KL, mask_KL, 0).to(tl.int32)
    return _signed(scale_K[:, None], (byte_KL >> (at_L % 8)[None, :] & 1) != 0)


@triton.jit
def _mean(wire8, wire32, stride, rows, weight, head_K, codes_KL, at_L, mask_K, mask_KL, K: tl.constexpr):
    sum_KL = tl.zeros((K, _L), tl.float32)
    for _ in range(rows):
        sum_KL += _row(wire8, wire32, head_K, codes_KL, at_L, mask_K, mask_KL)
        wire8 += stride
        wire32 += stride // 4
    return sum_KL * weight


@triton.jit
def _folded(sums_KL, K: tl.constexpr):
    """[K]: sum k takes in sum k + half for half = 32, ..., 1."""
    a = tl.sum(tl.reshape(sums_KL, (K, 2, 32)), axis=1)
    a = tl.sum(tl.reshape(a, (K, 2, 16)), axis=1)
    a = tl.sum(tl.reshape(a, (K, 2, 8)), axis=1)
    a = tl.sum(tl.reshape(a, (K, 2, 4)), axis=1)
    a = tl.sum(tl.reshape(a, (K, 2, 2)), axis=1)
    return tl.sum(a, axis=1)


@triton.jit
def encode(
    x,
    x_stride,
    residual,
    residual_stride,
    from8,
    from32,
    from_stride,
    from_rows,
    weight,
    wire8,
    wire32,
    wire_stride,
    head,
    codes,
    n,
    block,
    num_blocks,
    MEAN: tl.constexpr,
    FEEDBACK: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
):
    """Encode x, or the mean of decoded rows; with the residual if there is one."""
    row = tl.program_id(1).to(tl.int64)
    b_K = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    mask_K = b_K < num_blocks
    head_K, size_K = head // 4 + b_K, tl.minimum(block, n - b_K * block)
    residual += row * residual_stride
    to8, byte_8 = wire8 + row * wire_stride + codes, tl.arange(0, 8)
    sums_KL = tl.zeros((K, _L), tl.float32)
    for first in range(0, B, _L):
        at_L = first + tl.arange(0, _L)
        at_KL = b_K[:, None] * block + at_L[None, :]
        mask_KL = at_L[None, :] < size_K[:, None]
        if MEAN:
            codes_KL = codes + at_KL // 8
            e_KL = _mean(from8, from32, from_stride, from_rows, weight, head_K, codes_KL, at_L, mask_K, mask_KL, K)
        else:
            e_KL = tl.load(x + row * x_stride + at_KL, mask_KL, 0.0)
        if FEEDBACK:
            e_KL += tl.load(residual + at_KL, mask_KL, 0.0)
            tl.store(residual + at_KL, e_KL, mask_KL)
        bits_KL = e_KL.to(tl.int32, bitcast=True)
        sums_KL += tl.where(mask_KL, (bits_KL & 0x7FFFFFFF).to(tl.float32, bitcast=True), 0.0)
        negative_KL = tl.where(mask_KL & (bits_KL < 0), 1, 0) << (at_L % 8)[None, :]
        byte_K8 = tl.sum(tl.reshape(negative_KL, (K, 8, 8)), axis=2)
        in_K8 = first + byte_8[None, :] * 8 < size_K[:, None]
        tl.store(to8 + (b_K[:, None] * block + first) // 8 + byte_8[None, :], byte_K8.to(tl.uint8), in_K8)
    scale_K = tl.div_rn(_folded(sums_KL, K), tl.maximum(size_K, 1).to(tl.float32))
    good_K = is_finite(scale_K)
    tl.store(wire32 + row * (wire_stride // 4) + head_K, tl.where(good_K, scale_K, float("nan")), mask_K)
    tl.debug_barrier()  # what other threads wrote is read or written again
    for first in range(0, B, _L):
        at_L = first + tl.arange(0, _L)
        at_KL = b_K[:, None] * block + at_L[None, :]
        mask_KL = at_L[None, :] < size_K[:, None]
        in_K8 = (first + byte_8[None, :] * 8 < size_K[:, None]) & ~good_K[:, None]
        zero_K8 = tl.zeros((K, 8), tl.uint8)
        tl.store(to8 + (b_K[:, None] * block + first) // 8 + byte_8[None, :], zero_K8, in_K8)
        if FEEDBACK:
            e_KL = tl.load(residual + at_KL, mask_KL, 0.0)
            y_KL = _signed(scale_K[:, None], e_KL.to(tl.int32, bitcast=True) < 0)
            tl.store(residual + at_KL, tl.where(good_K[:, None], e_KL - y_KL, 0.0), mask_KL)


@triton.jit
def decode(
    wire8,
    wire32,
    wire_stride,
    rows,
    weight,
    out,
    out_stride,
    head,
    codes,
    n,
    block,
    num_blocks,
    MEAN: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
):
    """Decode each row, or their mean."""
    row = tl.program_id(1).to(tl.int64)
    b_K = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    mask_K = b_K < num_blocks
    head_K, size_K = head // 4 + b_K, tl.minimum(block, n - b_K * block)
    for first in range(0, B, _L):
        at_L = first + tl.arange(0, _L)
        at_KL = b_K[:, None] * block + at_L[None, :]
        mask_KL = at_L[None, :] < size_K[:, None]
        codes_KL = codes + at_KL // 8
        if MEAN:
            y_KL = _mean(wire8, wire32, wire_stride, rows, weight, head_K, codes_KL, at_L, mask_K, mask_KL, K)
        else:
            from8, from32 = wire8 + row * wire_stride, wire32 + row * (wire_stride // 4)
            y_KL = _row(from8, from32, head_K, codes_KL, at_L, mask_K, mask_KL)
        tl.store(out + row * out_stride + at_KL, y_KL, mask_KL)

"""Int4 in Triton; see int4_torch.py for what is computed. A tile holds the low nibbles' elements or the high ones'."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from bagua.codecs.triton_common import DOWN, INFINITY_BITS, UP, rounded

__all__ = ["decode", "encode"]

_SEVENTH = tl.constexpr(0.1428571492433548)  # 1 / 7 in fp32


@triton.jit
def _at(b_K, n, block, B: tl.constexpr):
    """Elements of the low and of the high nibbles, their masks, and the bytes within the codes."""
    j_B = tl.arange(0, B)
    size_K = tl.minimum(block, n - b_K * block)
    half_K = (size_K + 1) // 2
    low_KB = b_K[:, None] * block + j_B[None, :]
    high_KB = low_KB + half_K[:, None]
    in_low_KB = j_B[None, :] < half_K[:, None]
    in_high_KB = half_K[:, None] + j_B[None, :] < size_K[:, None]
    return low_KB, high_KB, in_low_KB, in_high_KB, b_K[:, None] * (block // 2) + j_B[None, :]


@triton.jit
def _row(wire8, wire32, head_K, codes_KB, mask_K, mask_KB):
    most_K = tl.load(wire32 + head_K, mask_K, 0.0)
    q_KB = tl.load(wire8 + codes_KB, mask_KB, 0).to(tl.int32)
    low_KB, high_KB = q_KB << 28 >> 28, q_KB << 24 >> 28
    low_KB = (low_KB.to(tl.float32) * _SEVENTH) * most_K[:, None]
    return low_KB, (high_KB.to(tl.float32) * _SEVENTH) * most_K[:, None]


@triton.jit
def _mean(wire8, wire32, stride, rows, weight, head_K, codes_KB, mask_K, mask_KB, K: tl.constexpr, B: tl.constexpr):
    low_KB, high_KB = tl.zeros((K, B), tl.float32), tl.zeros((K, B), tl.float32)
    for _ in range(rows):
        a_KB, b_KB = _row(wire8, wire32, head_K, codes_KB, mask_K, mask_KB)
        low_KB += a_KB
        high_KB += b_KB
        wire8 += stride
        wire32 += stride // 4
    return low_KB * weight, high_KB * weight


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
    low_at, high_at, in_low, in_high, bytes_KB = _at(b_K, n, block, B)
    head_K, codes_KB = head // 4 + b_K, codes + bytes_KB
    if MEAN:
        low_KB, high_KB = _mean(from8, from32, from_stride, from_rows, weight, head_K, codes_KB, mask_K, in_low, K, B)
    else:
        low_KB = tl.load(x + row * x_stride + low_at, in_low, 0.0)
        high_KB = tl.load(x + row * x_stride + high_at, in_high, 0.0)
    if FEEDBACK:
        low_KB += tl.load(residual + row * residual_stride + low_at, in_low, 0.0)
        high_KB += tl.load(residual + row * residual_stride + high_at, in_high, 0.0)
    low_bits = tl.where(in_low, low_KB.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    high_bits = tl.where(in_high, high_KB.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    bits_K = tl.maximum(tl.max(low_bits, axis=1), tl.max(high_bits, axis=1))
    good_K = bits_K < INFINITY_BITS
    most_K = tl.where(good_K, bits_K, 0).to(tl.float32, bitcast=True)
    tiny_K = most_K < DOWN
    wide_K = tl.where(tiny_K, most_K * UP, most_K)
    scale_K = tl.where(wide_K > 0, tl.div_rn(7.0, tl.where(wide_K > 0, wide_K, 1.0)), 0.0)
    up_K = tl.where(tiny_K, UP, 1.0)
    low_q = tl.where(good_K[:, None] & in_low, rounded(low_KB * up_K[:, None] * scale_K[:, None]), 0)
    high_q = tl.where(good_K[:, None] & in_high, rounded(high_KB * up_K[:, None] * scale_K[:, None]), 0)
    byte_KB = (low_q & 15) | ((high_q & 15) << 4)
    tl.store(wire8 + row * wire_stride + codes_KB, byte_KB.to(tl.uint8), in_low)
    tl.store(wire32 + row * (wire_stride // 4) + head_K, tl.where(good_K, most_K, float("nan")), mask_K)
    if FEEDBACK:
        low_left = low_KB - (low_q.to(tl.float32) * _SEVENTH) * most_K[:, None]
        high_left = high_KB - (high_q.to(tl.float32) * _SEVENTH) * most_K[:, None]
        tl.store(residual + row * residual_stride + low_at, tl.where(good_K[:, None], low_left, 0.0), in_low)
        tl.store(residual + row * residual_stride + high_at, tl.where(good_K[:, None], high_left, 0.0), in_high)


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
    low_at, high_at, in_low, in_high, bytes_KB = _at(b_K, n, block, B)
    head_K, codes_KB = head // 4 + b_K, codes + bytes_KB
    if MEAN:
        low_KB, high_KB = _mean(wire8, wire32, wire_stride, rows, weight, head_K, codes_KB, mask_K, in_low, K, B)
    else:
        from8, from32 = wire8 + row * wire_stride, wire32 + row * (wire_stride // 4)
        low_KB, high_KB = _row(from8, from32, head_K, codes_KB, mask_K, in_low)
    tl.store(out + row * out_stride + low_at, low_KB, in_low)
    tl.store(out + row * out_stride + high_at, high_KB, in_high)

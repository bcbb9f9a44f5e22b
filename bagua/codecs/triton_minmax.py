"""Min-max uint8 in Triton; see minmax_torch.py for what is computed."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from bagua.codecs.triton_common import DOWN, HUGE, MOST, UP, is_finite, rounded

__all__ = ["decode", "encode"]


@triton.jit
def _steps(lo_K, hi_K):
    range_K = hi_K - lo_K
    tiny_K = (range_K > 0) & (range_K < DOWN)
    return tl.div_rn(tl.where(tiny_K, range_K * UP, range_K), 255.0), tl.where(tiny_K, DOWN, 1.0)


@triton.jit
def _row(wire8, wire32, head_K, codes_KB, mask_K, mask_KB):
    """Decoded."""
    lo_K = tl.load(wire32 + head_K, mask_K, 0.0)
    hi_K = tl.load(wire32 + head_K + 1, mask_K, 0.0)
    step_K, down_K = _steps(lo_K, hi_K)
    q_KB = tl.load(wire8 + codes_KB, mask_KB, 0).to(tl.float32)
    return lo_K[:, None] + (q_KB * step_K[:, None]) * down_K[:, None]


@triton.jit
def _through_zero(lo_K, hi_K):
    range_K = hi_K - lo_K
    moved_K = (lo_K < 0) & (hi_K >= 0) & (range_K >= DOWN) & (range_K < HUGE)
    bits_K = tl.div_rn(tl.where(moved_K, range_K, 1.0), 254.0).to(tl.int32, bitcast=True)
    step_K = ((bits_K + 255) & -256).to(tl.float32, bitcast=True)
    exact_K = tl.div_rn(-lo_K, step_K)
    below_K = rounded(exact_K).to(tl.float32)
    below_K += tl.where(below_K < exact_K, 1.0, 0.0)  # up; tl.ceil takes a denormal number for 0 on a GPU
    return tl.where(moved_K, -(below_K * step_K), lo_K), tl.where(moved_K, (255.0 - below_K) * step_K, hi_K)


@triton.jit
def _mean(wire8, wire32, stride, rows, weight, head_K, codes_KB, mask_K, mask_KB, K: tl.constexpr, B: tl.constexpr):
    sum_KB = tl.zeros((K, B), tl.float32)
    for _ in range(rows):
        sum_KB += _row(wire8, wire32, head_K, codes_KB, mask_K, mask_KB)
        wire8 += stride
        wire32 += stride // 4
    return sum_KB * weight


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
    e_B = tl.arange(0, B)
    mask_K = b_K < num_blocks
    at_KB = b_K[:, None] * block + e_B[None, :]
    mask_KB = (e_B[None, :] < block) & (at_KB < n)
    head_K, codes_KB = head // 4 + 2 * b_K, codes + at_KB
    if MEAN:
        x_KB = _mean(from8, from32, from_stride, from_rows, weight, head_K, codes_KB, mask_K, mask_KB, K, B)
    else:
        x_KB = tl.load(x + row * x_stride + at_KB, mask_KB, 0.0)
    if FEEDBACK:
        x_KB += tl.load(residual + row * residual_stride + at_KB, mask_KB, 0.0)
    nan_K = tl.max(((x_KB != x_KB) & mask_KB).to(tl.int32), axis=1)
    number_KB = mask_KB & (x_KB == x_KB)
    lo_K = tl.min(tl.where(number_KB, x_KB, float("inf")), axis=1) + 0.0
    hi_K = tl.max(tl.where(number_KB, x_KB, -float("inf")), axis=1) + 0.0
    lo_K, hi_K = _through_zero(lo_K, hi_K)
    range_K = hi_K - lo_K
    good_K = (range_K >= 0) & (range_K <= MOST) & (nan_K == 0)
    tiny_K = range_K < DOWN
    wide_K = tl.where(tiny_K, range_K * UP, range_K)
    scale_K = tl.where(wide_K > 0, tl.div_rn(255.0, tl.where(wide_K > 0, wide_K, 1.0)), 0.0)
    d_KB = (x_KB - lo_K[:, None]) * tl.where(tiny_K, UP, 1.0)[:, None]
    q_KB = tl.where(good_K[:, None], rounded(d_KB * scale_K[:, None]), 0)
    step_K, down_K = _steps(lo_K, hi_K)
    tl.store(wire8 + row * wire_stride + codes_KB, q_KB.to(tl.uint8), mask_KB)
    to_K = wire32 + row * (wire_stride // 4) + head_K
    tl.store(to_K, tl.where(good_K, lo_K, float("nan")), mask_K)
    tl.store(to_K + 1, tl.where(good_K, hi_K, float("nan")), mask_K)
    if FEEDBACK:
        y_KB = lo_K[:, None] + (q_KB.to(tl.float32) * step_K[:, None]) * down_K[:, None]
        left_KB = x_KB - y_KB
        left_KB = tl.where(good_K[:, None] & is_finite(left_KB), left_KB, 0.0)
        tl.store(residual + row * residual_stride + at_KB, left_KB, mask_KB)


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
    e_B = tl.arange(0, B)
    mask_K = b_K < num_blocks
    at_KB = b_K[:, None] * block + e_B[None, :]
    mask_KB = (e_B[None, :] < block) & (at_KB < n)
    head_K, codes_KB = head // 4 + 2 * b_K, codes + at_KB
    if MEAN:
        y_KB = _mean(wire8, wire32, wire_stride, rows, weight, head_K, codes_KB, mask_K, mask_KB, K, B)
    else:
        from8, from32 = wire8 + row * wire_stride, wire32 + row * (wire_stride // 4)
        y_KB = _row(from8, from32, head_K, codes_KB, mask_K, mask_KB)
    tl.store(out + row * out_stride + at_KB, y_KB, mask_KB)

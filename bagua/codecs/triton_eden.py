"""Eden in Triton, with and without a trellis; see eden_torch.py and trellis_torch.py for what is computed.

A tile is [K, P]: P is the padded size of a whole block. The ragged block may have a shorter padded size: the stages of
its rotation that are longer than that are left out, and its elements from there on are zero.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

from bagua.codecs.triton_common import INFINITY_BITS, is_finite, rounded
from bagua.codecs.triton_rotation import flip, hadamard, mix
from bagua.codecs.triton_trellis import search

__all__ = ["decode", "encode"]

_L = tl.constexpr(64)  # partial sums
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SEED = tl.constexpr(0xFFF)
_UNIT = tl.constexpr(1 / 2048)  # of the centroids of a trellis


@triton.jit
def _lane_sum(x_KP, K: tl.constexpr, P: tl.constexpr):
    """[K]: element i, not negative, in partial sum i % 64; then sum k takes in sum k + half for half = 32, ..., 1."""
    if P > _L:
        parts_KSL = tl.reshape(x_KP, (K, P // _L, _L))
        part_S = tl.arange(0, P // _L)[None, :, None]
        a = tl.zeros((K, _L), tl.float32)
        for part in range(P // _L):
            a += tl.sum(tl.where(part_S == part, parts_KSL, 0.0), axis=1)
    else:
        a = x_KP
    if P >= 64:
        a = tl.sum(tl.reshape(a, (K, 2, 32)), axis=1)
    if P >= 32:
        a = tl.sum(tl.reshape(a, (K, 2, 16)), axis=1)
    if P >= 16:
        a = tl.sum(tl.reshape(a, (K, 2, 8)), axis=1)
    a = tl.sum(tl.reshape(a, (K, 2, 4)), axis=1)
    a = tl.sum(tl.reshape(a, (K, 2, 2)), axis=1)
    return tl.sum(a, axis=1)


@triton.jit
def _level(square_KP, mean_K1, BITS: tl.constexpr):
    """The index of the nearest centroid."""
    zero_KP = tl.zeros_like(square_KP).to(tl.int32)
    if BITS == 1:
        return zero_KP
    elif BITS == 2:
        return zero_KP + (square_KP > mean_K1 * 0.9635362466).to(tl.int32)
    elif BITS == 3:
        level_KP = zero_KP + (square_KP > mean_K1 * 0.2505500323).to(tl.int32)
        level_KP += (square_KP > mean_K1 * 1.1024102896).to(tl.int32)
        return level_KP + (square_KP > mean_K1 * 3.0552505155).to(tl.int32)
    else:
        level_KP = zero_KP + (square_KP > mean_K1 * 0.0666784281).to(tl.int32)
        level_KP += (square_KP > mean_K1 * 0.2729056352).to(tl.int32)
        level_KP += (square_KP > mean_K1 * 0.6392798627).to(tl.int32)
        level_KP += (square_KP > mean_K1 * 1.2084293292).to(tl.int32)
        level_KP += (square_KP > mean_K1 * 2.0653679066).to(tl.int32)
        level_KP += (square_KP > mean_K1 * 3.3986095208).to(tl.int32)
        return level_KP + (square_KP > mean_K1 * 5.7638569597).to(tl.int32)


@triton.jit
def _magnitude(level_KP, BITS: tl.constexpr):
    """The magnitude of a centroid."""
    if BITS == 1:
        return tl.zeros_like(level_KP).to(tl.float32) + 1.0
    elif BITS == 2:
        return tl.where(level_KP == 0, 0.4527800346, 1.5104176085)
    elif BITS == 3:
        low_KP = tl.where(level_KP == 0, 0.2450941789, 0.7560052812)
        return tl.where(level_KP < 2, low_KP, tl.where(level_KP == 2, 1.3439092785, 2.1519457045))
    else:
        a_KP = tl.where(level_KP == 0, 0.1283950299, 0.3880482995)
        b_KP = tl.where(level_KP == 2, 0.6567591185, 0.9423404565)
        c_KP = tl.where(level_KP == 4, 1.2562311973, 1.6180463860)
        d_KP = tl.where(level_KP == 6, 2.0690172265, 2.7325895710)
        return tl.where(level_KP < 4, tl.where(level_KP < 2, a_KP, b_KP), tl.where(level_KP < 6, c_KP, d_KP))


@triton.jit
def _code(from8, codes_K, stride_K, at_P, in_KP, BITS: tl.constexpr):
    """[K, P] int32: bit p is that of plane p. Elements that are not `in_KP` have 0."""
    code_KP = tl.zeros_like(in_KP).to(tl.int32)
    for plane in tl.static_range(BITS):
        at_KP = codes_K[:, None] + plane * stride_K[:, None] + (at_P // 8)[None, :]
        byte_KP = tl.load(from8 + at_KP, in_KP, 0).to(tl.int32)
        code_KP |= ((byte_KP >> (at_P % 8)[None, :]) & 1) << plane
    return code_KP


@triton.jit
def _centroid(from8, codes_K, stride_K, size_K, at_P, table, BITS: tl.constexpr, STATES: tl.constexpr):
    """[K, P] fp32: what the codes of blocks stand for, before the rotation."""
    in_KP = at_P[None, :] < size_K[:, None]
    if STATES == 1:
        code_KP = _code(from8, codes_K, stride_K, at_P, in_KP, BITS)
        magnitude_KP = _magnitude(code_KP >> 1, BITS)
        z_KP = tl.where((code_KP & 1) != 0, magnitude_KP * -1.0, magnitude_KP)
    else:
        window_KP = tl.zeros_like(in_KP).to(tl.int32)
        for back in tl.static_range(6 if STATES == 32 else 5 - BITS):
            before_P = tl.maximum(at_P - back, 0)
            known_KP = in_KP & (at_P >= back)[None, :]
            window_KP |= _code(from8, codes_K, stride_K, before_P, known_KP, BITS) << (back * BITS)
        window_KP &= (STATES << BITS) - 1
        z_KP = tl.load(table + window_KP).to(tl.float32) * _UNIT
    return tl.where(in_KP, z_KP, 0.0)


@triton.jit
def _row(
    from8,
    from32,
    head_K,
    codes_K,
    stride_K,
    size_K,
    factor_K,
    at_P,
    mask_K,
    table,
    BITS: tl.constexpr,
    STATES: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    STAGES: tl.constexpr,
):
    """[K, P]: decoded blocks of one row."""
    word_K = tl.load(from32 + head_K, mask_K, 0.0).to(tl.int32, bitcast=True)
    z_KP = _centroid(from8, codes_K, stride_K, size_K, at_P, table, BITS, STATES)
    z_KP = hadamard(z_KP, size_K, factor_K, K, P, STAGES)
    scale_K = (word_K & ~_SEED).to(tl.float32, bitcast=True)
    return flip(z_KP * scale_K[:, None], (word_K & _SEED).to(tl.uint32), at_P)


@triton.jit
def _mean(
    from8,
    from32,
    stride,
    rows,
    weight,
    head_K,
    codes_K,
    stride_K,
    size_K,
    factor_K,
    at_P,
    mask_K,
    table,
    BITS: tl.constexpr,
    STATES: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    STAGES: tl.constexpr,
):
    sum_KP = tl.zeros((K, P), tl.float32)
    for _ in range(rows):
        sum_KP += _row(
            *(from8, from32, head_K, codes_K, stride_K, size_K, factor_K, at_P, mask_K, table),
            *(BITS, STATES, K, P, STAGES),
        )
        from8 += stride
        from32 += stride // 4
    return sum_KP * weight


@triton.jit(do_not_specialize=["from_stride", "from_rows", "wire_stride", "head", "codes", "n", "num_blocks", "rest"])
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
    num_blocks,
    rest,
    factor,
    rest_factor,
    table,
    units,
    decisions,
    BLOCK: tl.constexpr,
    MEAN: tl.constexpr,
    FEEDBACK: tl.constexpr,
    BITS: tl.constexpr,
    STATES: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Encode x, or the mean of decoded rows; with the residual if there is one.

    `rest` is the padded size of the ragged block, 0 without one. With a trellis `units` and `decisions` are scratch,
    [rows, num_blocks, P] int32.
    """
    row = tl.program_id(1).to(tl.int64)
    b_K = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    mask_K = b_K < num_blocks
    at_P = tl.arange(0, P)
    at_KP = b_K[:, None] * BLOCK + at_P[None, :]
    mask_KP = (at_KP < n) & (at_P < BLOCK)[None, :] & mask_K[:, None]
    ragged_K = (rest > 0) & (b_K == num_blocks - 1)
    size_K, factor_K = tl.where(ragged_K, rest, P), tl.where(ragged_K, rest_factor, factor)
    size_K = tl.where(mask_K, size_K, 0)
    head_K, codes_K, stride_K = head // 4 + b_K, codes + b_K * (BITS * BLOCK // 8), (size_K + 7) // 8
    residual += row * residual_stride
    if MEAN:
        e_KP = _mean(
            *(from8, from32, from_stride, from_rows, weight, head_K, codes_K, stride_K, size_K, factor_K, at_P, mask_K),
            *(table, BITS, STATES, K, P, STAGES),
        )
        e_KP = tl.where(mask_KP, e_KP, 0.0)
    else:
        e_KP = tl.load(x + row * x_stride + at_KP, mask_KP, 0.0)
    if FEEDBACK:
        e_KP += tl.load(residual + at_KP, mask_KP, 0.0)
    bits_KP = e_KP.to(tl.int32, bitcast=True)
    most_K = tl.max(bits_KP & _MAGNITUDE, axis=1)
    lost_K = most_K >= INFINITY_BITS
    exponent_K = tl.minimum(tl.maximum((most_K >> 23) - 127, -100), 120)
    seed_K = mix(tl.sum(bits_KP.to(tl.uint32, bitcast=True), axis=1).to(tl.uint32)) >> 20
    down_K = ((127 - exponent_K) << 23).to(tl.float32, bitcast=True)
    z_KP = tl.where(mask_KP, flip(e_KP * down_K[:, None], seed_K, at_P), 0.0)
    z_KP = hadamard(z_KP, size_K, factor_K, K, P, STAGES)
    in_KP = at_P[None, :] < size_K[:, None]
    z_KP = tl.where(in_KP, z_KP, 0.0)
    square_KP = z_KP * z_KP
    energy_K = _lane_sum(square_KP, K, P)
    mean_K = tl.div_rn(energy_K, size_K.to(tl.float32))
    to8, byte_H = wire8 + row * wire_stride, tl.arange(0, P // 8)
    if STATES == 1:
        level_KP = _level(square_KP, mean_K[:, None], BITS)
        product_KP = (z_KP.to(tl.int32, bitcast=True) & _MAGNITUDE).to(tl.float32, bitcast=True)
        product_KP = tl.where(in_KP, product_KP * _magnitude(level_KP, BITS), 0.0)
        code_KP = (z_KP.to(tl.int32, bitcast=True) >> 31) & 1 | (level_KP << 1)
    else:
        unit_K = tl.div_rn(tl.full((K,), 4096.0, tl.float32), tl.sqrt_rn(mean_K))
        unit_K = tl.where((mean_K > 0) & ~lost_K, unit_K, 0.0)
        x_KP = tl.where(lost_K[:, None], 0.0, z_KP * unit_K[:, None])
        scratch_K = (row * num_blocks + b_K) * P
        x_KP = rounded(tl.minimum(tl.maximum(x_KP, -16384.0), 16383.0))
        tl.store(units + scratch_K[:, None] + at_P[None, :], x_KP, mask_K[:, None])
        tl.debug_barrier()  # other threads read it
        search(*(units, decisions, scratch_K, size_K, to8 + codes_K, stride_K, lost_K, mask_K, table, BITS, STATES, K))
        product_KP = z_KP * _centroid(to8, codes_K, stride_K, size_K, at_P, table, BITS, STATES)
        code_KP = tl.zeros((K, P), tl.int32)
    scale_K = tl.div_rn(energy_K, _lane_sum(product_KP, K, P))
    up_K = ((exponent_K + 127) << 23).to(tl.float32, bitcast=True)
    scale_K = tl.where(energy_K == 0, 0.0, scale_K) * up_K
    rounded_K = (scale_K.to(tl.int32, bitcast=True) + 0x800) & ~_SEED
    lost_K = lost_K | ~is_finite(scale_K) | (rounded_K >= INFINITY_BITS)
    word_K = rounded_K | seed_K.to(tl.int32)
    header_K = tl.where(lost_K, float("nan"), word_K.to(tl.float32, bitcast=True))
    tl.store(wire32 + row * (wire_stride // 4) + head_K, header_K, mask_K)
    in_KH = mask_K[:, None] & (byte_H[None, :] < stride_K[:, None])
    for plane in tl.static_range(BITS):
        if STATES == 1:
            bit_KP = tl.where(lost_K[:, None], 0, (code_KP >> plane) & 1) << (at_P % 8)[None, :]
            byte_KH = tl.sum(tl.reshape(bit_KP, (K, P // 8, 8)), axis=2)
        else:  # the search has written them
            byte_KH = tl.zeros((K, P // 8), tl.int32)
            in_KH = in_KH & lost_K[:, None]
        to_KH = codes_K[:, None] + plane * stride_K[:, None] + byte_H[None, :]
        tl.store(to8 + to_KH, byte_KH.to(tl.uint8), in_KH)
    if FEEDBACK:
        if STATES == 1:
            magnitude_KP = _magnitude(code_KP >> 1, BITS)
            y_KP = tl.where((code_KP & 1) != 0, magnitude_KP * -1.0, magnitude_KP)
            y_KP = tl.where(in_KP, y_KP, 0.0)
        else:
            y_KP = _centroid(to8, codes_K, stride_K, size_K, at_P, table, BITS, STATES)
        y_KP = hadamard(y_KP, size_K, factor_K, K, P, STAGES)
        y_KP = flip(y_KP * rounded_K.to(tl.float32, bitcast=True)[:, None], seed_K, at_P)
        left_KP = e_KP - y_KP
        tl.store(residual + at_KP, tl.where(is_finite(left_KP) & ~lost_K[:, None], left_KP, 0.0), mask_KP)


@triton.jit(do_not_specialize=["wire_stride", "rows", "head", "codes", "n", "num_blocks", "rest"])
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
    num_blocks,
    rest,
    factor,
    rest_factor,
    table,
    BLOCK: tl.constexpr,
    MEAN: tl.constexpr,
    BITS: tl.constexpr,
    STATES: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Decode each row, or their mean."""
    row = tl.program_id(1).to(tl.int64)
    b_K = tl.program_id(0).to(tl.int64) * K + tl.arange(0, K)
    mask_K = b_K < num_blocks
    at_P = tl.arange(0, P)
    at_KP = b_K[:, None] * BLOCK + at_P[None, :]
    mask_KP = (at_KP < n) & (at_P < BLOCK)[None, :] & mask_K[:, None]
    ragged_K = (rest > 0) & (b_K == num_blocks - 1)
    size_K, factor_K = tl.where(ragged_K, rest, P), tl.where(ragged_K, rest_factor, factor)
    size_K = tl.where(mask_K, size_K, 0)
    head_K, codes_K, stride_K = head // 4 + b_K, codes + b_K * (BITS * BLOCK // 8), (size_K + 7) // 8
    if MEAN:
        y_KP = _mean(
            *(wire8, wire32, wire_stride, rows, weight, head_K, codes_K, stride_K, size_K, factor_K, at_P, mask_K),
            *(table, BITS, STATES, K, P, STAGES),
        )
    else:
        from8, from32 = wire8 + row * wire_stride, wire32 + row * (wire_stride // 4)
        y_KP = _row(
            *(from8, from32, head_K, codes_K, stride_K, size_K, factor_K, at_P, mask_K, table),
            *(BITS, STATES, K, P, STAGES),
        )
    tl.store(out + row * out_stride + at_KP, y_KP, mask_KP)

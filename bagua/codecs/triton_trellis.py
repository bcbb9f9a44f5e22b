"""The search through a trellis in Triton; see trellis_torch.py for what is computed."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["search"]

_UNREACHED = tl.constexpr(12000)  # cost of all states but the first, before a block


@triton.jit
def search(
    units,
    decisions,
    at_K,
    size_K,
    to8,
    stride_K,
    lost_K,
    mask_K,
    table,
    BITS: tl.constexpr,
    STATES: tl.constexpr,
    K: tl.constexpr,
):
    """Write the codes of the best paths (Viterbi). `units` and `decisions` hold a number for each element of blocks."""
    CODES: tl.constexpr = 1 << BITS
    from_F = tl.arange(0, CODES)[:, None]
    state_S = tl.arange(0, STATES)
    centroid_FS = tl.load(table + from_F * STATES + state_S[None, :])
    energy_FS = (centroid_FS * centroid_FS + 0x8000) >> 16
    cost_KS = tl.zeros((K, STATES), tl.int32) + tl.where(state_S == 0, 0, _UNREACHED)[None, :]
    most = tl.max(size_K, axis=0)
    for i in range(most):
        x_K = tl.load(units + at_K + i, mask_K & (i < size_K), 0)
        branch_KFS = energy_FS[None, :, :] - ((x_K[:, None, None] * centroid_FS[None, :, :]) >> 16)
        # The state before a window is its upper bits.
        before_KSF = tl.broadcast_to(cost_KS[:, :, None], (K, STATES, CODES))
        before_KFS = tl.reshape(before_KSF, (K, CODES, STATES))
        # With the first of several that are equally good.
        best_KS = tl.min((before_KFS + branch_KFS) * CODES + from_F[None, :, :], axis=1)
        went_K = tl.sum((best_KS & (CODES - 1)) << (state_S * BITS)[None, :], axis=1)
        tl.store(decisions + at_K + i, went_K, mask_K & (i < size_K))
        cost_KS = tl.where((i < size_K)[:, None], best_KS >> BITS, cost_KS)
    tl.debug_barrier()  # what other threads wrote is read
    state_K = tl.min(cost_KS * STATES + state_S[None, :], axis=1) & (STATES - 1)
    for group in range(most // 8):
        first_K = size_K - 8 * (group + 1)
        in_K = mask_K & (first_K >= 0)
        a_K, b_K = tl.zeros_like(state_K), tl.zeros_like(state_K)  # bytes of the planes
        for back in tl.static_range(8):
            went_K = tl.load(decisions + at_K + first_K + (7 - back), in_K, 0)
            a_K |= (state_K & 1) << (7 - back)
            if BITS == 2:
                b_K |= ((state_K >> 1) & 1) << (7 - back)
            went_K = (went_K >> (state_K * BITS)) & (CODES - 1)
            state_K = tl.where(in_K, (went_K * STATES | state_K) >> BITS, state_K)
        tl.store(to8 + first_K // 8, tl.where(lost_K, 0, a_K).to(tl.uint8), in_K)
        if BITS == 2:
            tl.store(to8 + stride_K + first_K // 8, tl.where(lost_K, 0, b_K).to(tl.uint8), in_K)
    tl.debug_barrier()

"""Weighted sums of rows, for codecs that send plain numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.codecs import backends
from bagua.codecs.chunks import chunks, sum_dtype

__all__ = ["mean_of_rows"]


def mean_of_rows(rows_RN: Tensor, out_N: Tensor, weight: float) -> None:
    """`out_N = weight * sum of rows_RN` in fp32 (fp64 if `out_N` is), summed in the order of the rows.

    Shapes: rows_RN: [R, N] of any floating dtype and row stride, last dim contiguous; out_N: [N] contiguous.
    """
    if torch.float64 in (rows_RN.dtype, out_N.dtype):
        _eager(rows_RN, out_N, weight)
        return
    mean = backends.kernels(out_N.device).mean
    if mean is None:
        _eager(rows_RN, out_N, weight)
    elif out_N.dtype == torch.float32:
        mean(rows_RN, weight, out_N)
    else:
        for lo, hi in chunks(out_N.shape[0], 1, out_N.device):
            total_C = torch.empty(hi - lo, dtype=torch.float32, device="cpu")
            mean(rows_RN[:, lo:hi], weight, total_C)
            out_N[lo:hi].copy_(total_C)


def _eager(rows_RN: Tensor, out_N: Tensor, weight: float) -> None:
    """In cache-sized chunks on CPU."""
    wide = sum_dtype(out_N.dtype)
    for lo, hi in chunks(out_N.shape[0], 1, out_N.device):
        out_C = out_N[lo:hi]
        total_C = out_C if out_C.dtype == wide else torch.empty_like(out_C, dtype=wide)
        total_C.copy_(rows_RN[0, lo:hi])
        row_C = total_C if rows_RN.dtype == wide else torch.empty_like(total_C)
        for row_N in rows_RN[1:]:
            # Adding a row of another dtype at once is several times slower on CPU.
            total_C.add_(row_N[lo:hi] if rows_RN.dtype == wide else row_C.copy_(row_N[lo:hi]))
        total_C.mul_(weight)
        if total_C is not out_C:
            out_C.copy_(total_C)

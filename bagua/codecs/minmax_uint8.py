"""Eight-bit linear quantisation between the minimum and the maximum of each block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from . import native
from .base import Codec, chunks, pad4


@dataclass(frozen=True)
class MinMaxUInt8(Codec):
    """One byte for each element, and the minimum and maximum of each block.

    With range = max - min: q = rint((x - min) * (255 / range)), x' = min + q * (range / 255), in fp32 (fp64
    rows go through fp32). The error is at most half a step, range / 510. A constant block is exact. A block
    that holds a NaN or an infinity, or whose range overflows fp32, decodes to NaN everywhere, so that a
    gradient scaler sees it. The header is (min, max) as fp32 for each block, then follow the codes; zeros pad
    the row.

    Args:
        block: elements of a block; smaller costs bytes and gains accuracy. None: the whole row is one block.

    Bytes:
        ``n + 8 * ceil(n / block)``, padded to a multiple of 4.

    Source:
        ByteGrad's MinMaxUInt8 of the original Bagua (arXiv:2107.01499, section 3.3), which has one range
        for a whole chunk; ranges for blocks as in QSGD's buckets (arXiv:1610.02132, section 4).

    Differs:
        from the original in the header (once for each block, no padding to 32 bytes), in rounding x - min
        instead of x and min apart, and in that NaN and infinities are kept visible.
    """

    name: ClassVar[str] = "minmax_uint8"
    linear: ClassVar[bool] = False
    lossless: ClassVar[bool] = False

    block: int | None = 1024

    def __post_init__(self) -> None:
        """Raises ValueError unless ``block`` is a positive int or None."""
        if self.block is not None and (type(self.block) is not int or self.block < 1):
            raise ValueError(f"block must be a positive int or None (the whole row), got {self.block!r}")

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """Exact bytes of one row, see `Codec.wire_bytes`."""
        return pad4(self._head_bytes(n) + n)

    def _head_bytes(self, n: int) -> int:
        return 8 * -(-n // (self.block or max(n, 1)))

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        kernels, n = native.kernels(x_RN.device), x_RN.shape[1]
        head_bytes, block = self._head_bytes(n), self.block or n
        for lo, hi in self._parts(x_RN, kernels.staged):
            x_RC = x_RN if hi - lo == n else x_RN[:, lo:hi]
            x_RC = x_RC.to(torch.float32)
            kernels.encode(x_RC, wire_RW, lo // block * 8, head_bytes + lo, block)
        if head_bytes + n < wire_RW.shape[1]:
            wire_RW[:, head_bytes + n :].zero_()

    def _decode(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        kernels, n = native.kernels(wire_RW.device), out_RN.shape[1]
        head_bytes, block = self._head_bytes(n), self.block or n
        for lo, hi in self._parts(out_RN, kernels.staged):
            out_RC = out_RN if hi - lo == n else out_RN[:, lo:hi]
            y_RC = _fp32_like(out_RC)
            kernels.decode(wire_RW, lo // block * 8, head_bytes + lo, block, y_RC)
            if y_RC is not out_RC:
                out_RC.copy_(y_RC)

    def _decode_mean(self, wire_RW: Tensor, out_N: Tensor, weight: float) -> None:
        kernels, n = native.kernels(wire_RW.device), out_N.shape[0]
        head_bytes, block = self._head_bytes(n), self.block or n
        for lo, hi in self._parts(out_N, kernels.staged):
            out_C = out_N if hi - lo == n else out_N[lo:hi]
            y_C = _fp32_like(out_C)
            kernels.decode_mean(wire_RW, lo // block * 8, head_bytes + lo, block, weight, y_C)
            if y_C is not out_C:
                out_C.copy_(y_C)

    def _parts(self, x: Tensor, staged: bool) -> Iterable[tuple[int, int]]:
        """Ranges of whole blocks of ``x``: one range, unless scratch is needed."""
        n = x.shape[-1]
        if not staged and x.dtype == torch.float32:
            return ((0, n),)
        return chunks(n, self.block or n, x.device)


def _fp32_like(x: Tensor) -> Tensor:
    """``x`` itself if it is fp32, else scratch of its shape."""
    return x if x.dtype == torch.float32 else torch.empty(x.shape, dtype=torch.float32, device=x.device)

"""Min-max uint8 kernels in eager torch: the reference, also used on other devices and without a compiler.

The compiled kernels do the same fp32 operations in the same order; change both or neither.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.codecs.layout import Layout, anywhere, header_floats

__all__ = ["LAYOUT", "MinMaxTorch"]

LAYOUT = Layout("minmax_uint8", header_bytes=8, code_bits=8)

_TINY_RANGE = 2.0**-100  # below it 255 / range may overflow and range / 255 lose digits
_UP, _DOWN = 2.0**100, 2.0**-100
_HUGE_RANGE = 2.0**126


class MinMaxTorch:
    """Encode and decode whole blocks (the last may be ragged) on any device, see `kernels.Kernels`."""

    def encode(self, x_RC: Tensor, wire_RW: Tensor, head: int, codes: int, block: int) -> None:
        """Write header and codes of each block."""
        for header, x_RKB, codes_RKB in LAYOUT.blocks(x_RC, wire_RW, head, codes, block):
            # Two reductions: torch.aminmax over a dim is 10 times slower on CPU. -0 + 0.0 is +0.
            lo_RK1, hi_RK1 = _through_zero(x_RKB.amin(-1, keepdim=True) + 0.0, x_RKB.amax(-1, keepdim=True) + 0.0)
            range_RK1 = hi_RK1 - lo_RK1
            finite_RK1 = range_RK1.isfinite()
            tiny_RK1 = range_RK1 < _TINY_RANGE
            wide_RK1 = torch.where(tiny_RK1, range_RK1 * _UP, range_RK1)
            scale_RK1 = torch.full_like(wide_RK1, 255.0) / wide_RK1  # 255.0 / wide would multiply by 1 / wide
            scale_RK1.masked_fill_(~finite_RK1 | (range_RK1 == 0), 0.0)
            q_RKB = x_RKB - lo_RK1
            if anywhere(tiny_RK1):
                q_RKB.mul_(torch.where(tiny_RK1, _UP, 1.0))
            q_RKB.mul_(scale_RK1).round_()
            if anywhere(~finite_RK1):
                q_RKB.nan_to_num_(0.0, 0.0, 0.0)
                lo_RK1 = lo_RK1.masked_fill(~finite_RK1, float("nan"))
                hi_RK1 = hi_RK1.masked_fill(~finite_RK1, float("nan"))
            codes_RKB.copy_(q_RKB.to(torch.int16))  # fp32 to uint8 at once is 3 times slower on CPU
            head_RKH = torch.cat((lo_RK1, hi_RK1), dim=-1).view(torch.uint8)
            header.copy_(head_RKH.flatten(1))

    def decode(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor) -> None:
        """x' = lo + (q * step) * down."""
        for header, out_RKB, codes_RKB in LAYOUT.blocks(out_RC, wire_RW, head, codes, block):
            lo_RK1, step_RK1, down_RK1 = _steps(header)
            out_RKB.copy_(codes_RKB).mul_(step_RK1)
            if down_RK1 is not None:
                out_RKB.mul_(down_RK1)
            out_RKB.add_(lo_RK1)

    def decode_mean(self, wire_RW: Tensor, head: int, codes: int, block: int, weight: float, out_C: Tensor) -> None:
        """out = weight * sum of (lo + (q * step) * down), rows in order."""
        for header, out_1KB, codes_RKB in LAYOUT.blocks(out_C[None], wire_RW, head, codes, block):
            lo_RK1, step_RK1, down_RK1 = _steps(header)
            total_KB, row_KB = out_1KB[0].zero_(), torch.empty_like(out_1KB[0])
            for r in range(codes_RKB.shape[0]):
                row_KB.copy_(codes_RKB[r]).mul_(step_RK1[r])
                if down_RK1 is not None:
                    row_KB.mul_(down_RK1[r])
                total_KB.add_(row_KB.add_(lo_RK1[r]))
            total_KB.mul_(weight)


def _through_zero(lo_RK1: Tensor, hi_RK1: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of levels of which one is zero, where that lies between them.

    Steps have 16 digits, so that all is exact that is done with them: an element that is 0 stays 0.
    """
    range_RK1 = hi_RK1 - lo_RK1
    moved_RK1 = (lo_RK1 < 0) & (hi_RK1 >= 0) & (range_RK1 >= _TINY_RANGE) & (range_RK1 < _HUGE_RANGE)
    step_RK1 = range_RK1 / torch.full_like(range_RK1, 254.0)
    step_RK1 = step_RK1.view(torch.int32).add_(255).bitwise_and_(-256).view(torch.float32)
    below_RK1 = (-lo_RK1 / step_RK1).ceil_()
    lo_RK1 = torch.where(moved_RK1, -(below_RK1 * step_RK1), lo_RK1)
    return lo_RK1, torch.where(moved_RK1, (255.0 - below_RK1) * step_RK1, hi_RK1)


def _steps(head_RH: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """lo, step and down of each block, [R, K, 1]; down is None where it would be 1 everywhere."""
    bounds_RK2 = header_floats(head_RH, 2)
    lo_RK1 = bounds_RK2[..., :1]
    range_RK1 = bounds_RK2[..., 1:] - lo_RK1
    tiny_RK1 = (range_RK1 > 0) & (range_RK1 < _TINY_RANGE)
    wide_RK1 = torch.where(tiny_RK1, range_RK1 * _UP, range_RK1)
    step_RK1 = wide_RK1 / torch.full_like(wide_RK1, 255.0)  # wide / 255.0 multiplies by 1 / 255.0 on a GPU
    return lo_RK1, step_RK1, torch.where(tiny_RK1, _DOWN, 1.0) if anywhere(tiny_RK1) else None

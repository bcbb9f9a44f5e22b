"""Min-max uint8 kernels in eager torch: the reference, and what runs on other devices or without a compiler.

The compiled kernels do the same fp32 operations in the same order; change both or neither.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_TINY_RANGE = 2.0**-100  # below it 255 / range may overflow and range / 255 lose digits
_UP, _DOWN = 2.0**100, 2.0**-100


class TorchKernels:
    """Encode and decode whole blocks (the last may be ragged) on any device. fp32 only.

    ``head`` and ``codes`` are the bytes of a wire row where the header and the codes of the blocks begin.

    Shapes:
        x_RC, out_RC: [R, C] fp32, last dim contiguous; wire_RW: [R, W] uint8; out_C: [C] fp32.
    """

    name = "torch"
    staged = True  # callers pass cache-sized chunks, for the sake of the scratch

    def encode(self, x_RC: Tensor, wire_RW: Tensor, head: int, codes: int, block: int) -> None:
        """Writes header and codes of each block."""
        for header, x_RKB, codes_RKB in _blocks(x_RC, wire_RW, head, codes, block):
            # Two reductions: torch.aminmax over a dim is 10 times slower on CPU. -0 + 0.0 is +0.
            lo_RK1, hi_RK1 = x_RKB.amin(-1, keepdim=True) + 0.0, x_RKB.amax(-1, keepdim=True) + 0.0
            range_RK1 = hi_RK1 - lo_RK1
            finite_RK1 = range_RK1.isfinite()
            tiny_RK1 = range_RK1 < _TINY_RANGE
            wide_RK1 = torch.where(tiny_RK1, range_RK1 * _UP, range_RK1)
            scale_RK1 = torch.full_like(wide_RK1, 255.0) / wide_RK1  # 255.0 / wide would multiply by 1 / wide
            scale_RK1.masked_fill_(~finite_RK1 | (range_RK1 == 0), 0.0)
            q_RKB = x_RKB - lo_RK1
            if _any(tiny_RK1):
                q_RKB.mul_(torch.where(tiny_RK1, _UP, 1.0))
            q_RKB.mul_(scale_RK1).round_()
            if _any(~finite_RK1):
                q_RKB.nan_to_num_(0.0, 0.0, 0.0)
                lo_RK1 = lo_RK1.masked_fill(~finite_RK1, float("nan"))
                hi_RK1 = hi_RK1.masked_fill(~finite_RK1, float("nan"))
            codes_RKB.copy_(q_RKB.to(torch.int16))  # fp32 to uint8 at once is 3 times slower on CPU
            head_RKH = torch.cat((lo_RK1, hi_RK1), dim=-1).view(torch.uint8)
            header.copy_(head_RKH.flatten(1))

    def decode(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor) -> None:
        """x' = lo + (q * step) * down."""
        for header, out_RKB, codes_RKB in _blocks(out_RC, wire_RW, head, codes, block):
            lo_RK1, step_RK1, down_RK1 = _steps(header)
            out_RKB.copy_(codes_RKB).mul_(step_RK1)
            if down_RK1 is not None:
                out_RKB.mul_(down_RK1)
            out_RKB.add_(lo_RK1)

    def decode_mean(self, wire_RW: Tensor, head: int, codes: int, block: int, weight: float, out_C: Tensor) -> None:
        """out = weight * (sum of lo + sum of (q * step) * down), rows in order."""
        for header, out_1KB, codes_RKB in _blocks(out_C[None], wire_RW, head, codes, block):
            lo_RK1, step_RK1, down_RK1 = _steps(header)
            base_K1 = torch.zeros_like(lo_RK1[0])
            for lo_K1 in lo_RK1:
                base_K1.add_(lo_K1)
            total_KB, row_KB = out_1KB[0].copy_(base_K1), torch.empty_like(out_1KB[0])
            for r in range(codes_RKB.shape[0]):
                row_KB.copy_(codes_RKB[r]).mul_(step_RK1[r])
                if down_RK1 is not None:
                    row_KB.mul_(down_RK1[r])
                total_KB.add_(row_KB)
            total_KB.mul_(weight)


def _steps(head_RH: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """lo, step and down of each block, [R, K, 1]; down is None where it would be 1 everywhere."""
    aligned_RH = head_RH.clone(memory_format=torch.contiguous_format)
    bounds_RK2 = aligned_RH.view(torch.float32).unflatten(1, (-1, 2))
    lo_RK1 = bounds_RK2[..., :1]
    range_RK1 = bounds_RK2[..., 1:] - lo_RK1
    tiny_RK1 = (range_RK1 > 0) & (range_RK1 < _TINY_RANGE)
    step_RK1 = torch.where(tiny_RK1, range_RK1 * _UP, range_RK1) / 255.0
    return lo_RK1, step_RK1, torch.where(tiny_RK1, _DOWN, 1.0) if _any(tiny_RK1) else None


def _blocks(
    x_RC: Tensor, wire_RW: Tensor, head: int, codes: int, block: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Headers [R, 8 * K], elements [R, K, B] and codes [R, K, B] of whole blocks, then of the ragged one."""
    n = x_RC.shape[1]
    whole, rest = divmod(n, block)
    cut = whole * block
    if whole:
        elements_RKB = x_RC[:, :cut].unflatten(1, (whole, block))
        codes_RKB = wire_RW[:, codes : codes + cut].unflatten(1, (whole, block))
        yield wire_RW[:, head : head + 8 * whole], elements_RKB, codes_RKB
    if rest:
        header = wire_RW[:, head + 8 * whole : head + 8 * whole + 8]
        yield header, x_RC[:, cut:].unsqueeze(1), wire_RW[:, codes + cut : codes + n].unsqueeze(1)


def _any(mask: Tensor) -> bool:
    """Whether a rare case is there. Asking a GPU would wait for it: there the answer is always yes."""
    return mask.device.type != "cpu" or bool(mask.any())

"""Int4 kernels in eager torch: the reference, also used on other devices and without a compiler.

The compiled kernels do the same fp32 operations in the same order; change both or neither.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.codecs.layout import Layout, anywhere, header_floats

__all__ = ["LAYOUT", "Int4Torch"]

LAYOUT = Layout("int4", header_bytes=4, code_bits=4)

_TINY, _UP = 2.0**-100, 2.0**100  # below it 7 / absmax may overflow
_SEVENTH = 1 / 7  # 7 * _SEVENTH is exactly 1 in fp32, so the largest element is exact


class Int4Torch:
    """Encode and decode whole blocks (the last may be ragged) on any device, see `kernels.Kernels`."""

    def encode(self, x_RC: Tensor, wire_RW: Tensor, head: int, codes: int, block: int) -> None:
        """Write the largest magnitude and the codes of each block."""
        for header, x_RKB, codes_RKH in LAYOUT.blocks(x_RC, wire_RW, head, codes, block):
            most_RK1 = x_RKB.abs().amax(-1, keepdim=True)
            lost_RK1, tiny_RK1 = ~most_RK1.isfinite(), most_RK1 < _TINY
            wide_RK1 = torch.where(tiny_RK1, most_RK1 * _UP, most_RK1)
            scale_RK1 = torch.full_like(wide_RK1, 7.0) / wide_RK1  # 7.0 / wide would multiply by 1 / wide
            scale_RK1.masked_fill_(lost_RK1 | (most_RK1 == 0), 0.0)
            if anywhere(tiny_RK1):
                q_RKB = (x_RKB * torch.where(tiny_RK1, _UP, 1.0)).mul_(scale_RK1).round_()
            else:
                q_RKB = (x_RKB * scale_RK1).round_()
            if anywhere(lost_RK1):
                q_RKB.nan_to_num_(0.0, 0.0, 0.0)
                most_RK1.masked_fill_(lost_RK1, float("nan"))
            nibble_RKB = q_RKB.to(torch.int8).view(torch.uint8).bitwise_and_(15)
            half = codes_RKH.shape[-1]
            codes_RKH.copy_(nibble_RKB[..., :half])
            codes_RKH[..., : x_RKB.shape[-1] - half].bitwise_or_(nibble_RKB[..., half:] << 4)
            header.copy_(most_RK1.view(torch.uint8).flatten(1))

    def decode(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor) -> None:
        """x' = (q * (1 / 7)) * absmax."""
        for header, out_RKB, codes_RKH in LAYOUT.blocks(out_RC, wire_RW, head, codes, block):
            _unpack(codes_RKH, out_RKB).mul_(_SEVENTH).mul_(header_floats(header, 1))

    def decode_mean(self, wire_RW: Tensor, head: int, codes: int, block: int, weight: float, out_C: Tensor) -> None:
        """out = weight * sum of the decoded rows, in order."""
        for header, out_1KB, codes_RKH in LAYOUT.blocks(out_C[None], wire_RW, head, codes, block):
            most_RK1 = header_floats(header, 1)
            total_KB, row_KB = out_1KB[0].zero_(), torch.empty_like(out_1KB[0])
            for r in range(codes_RKH.shape[0]):
                total_KB.add_(_unpack(codes_RKH[r], row_KB).mul_(_SEVENTH).mul_(most_RK1[r]))
            total_KB.mul_(weight)


def _unpack(codes: Tensor, out: Tensor) -> Tensor:
    """Write the codes -7..7 to `out`: first all low nibbles, then the high ones."""
    half = codes.shape[-1]
    signed = codes.view(torch.int8)
    out[..., :half].copy_((codes << 4).view(torch.int8) >> 4)
    out[..., half:].copy_(signed[..., : out.shape[-1] - half] >> 4)
    return out

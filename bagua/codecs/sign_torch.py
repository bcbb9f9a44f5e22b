"""Sign kernels in eager torch: the reference, also used on other devices and without a compiler.

The compiled kernels do the same fp32 operations in the same order; change both or neither.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from bagua.codecs.layout import Layout, anywhere, header_floats

__all__ = ["LAYOUT", "SignTorch", "lane_sum", "pack_bits"]

LAYOUT = Layout("sign", header_bytes=4, code_bits=1)

_LANES = 64
# Times eight bytes that are 0 or 1: the highest byte of the product holds them as bits, the first the lowest.
_GATHER = 0x0102040810204080


class SignTorch:
    """Encode and decode whole blocks (the last may be ragged) on any device, see `kernels.Kernels`."""

    def encode(self, x_RC: Tensor, wire_RW: Tensor, head: int, codes: int, block: int) -> None:
        """Write the mean magnitude and the sign bits of each block."""
        for header, x_RKB, codes_RKB in LAYOUT.blocks(x_RC, wire_RW, head, codes, block):
            sum_RK1 = lane_sum(x_RKB.abs())
            scale_RK1 = sum_RK1 / torch.full_like(sum_RK1, x_RKB.shape[-1])
            lost_RK1 = ~scale_RK1.isfinite()
            negative_RKB = x_RKB.signbit()
            if anywhere(lost_RK1):
                negative_RKB = negative_RKB & ~lost_RK1
                scale_RK1.masked_fill_(lost_RK1, float("nan"))
            codes_RKB.copy_(pack_bits(negative_RKB))
            header.copy_(scale_RK1.view(torch.uint8).flatten(1))

    def decode(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor) -> None:
        """x' = scale or -scale."""
        for header, out_RKB, codes_RKB in LAYOUT.blocks(out_RC, wire_RW, head, codes, block):
            scale_RK1 = header_floats(header, 1)
            out_RKB.copy_(_unpack(codes_RKB, out_RKB.shape[-1])).mul_(scale_RK1)

    def decode_mean(self, wire_RW: Tensor, head: int, codes: int, block: int, weight: float, out_C: Tensor) -> None:
        """out = weight * sum of the decoded rows, in order."""
        for header, out_1KB, codes_RKB in LAYOUT.blocks(out_C[None], wire_RW, head, codes, block):
            scale_RK1 = header_floats(header, 1)
            total_KB, row_KB = out_1KB[0].zero_(), torch.empty_like(out_1KB[0])
            for r in range(codes_RKB.shape[0]):
                total_KB.add_(row_KB.copy_(_unpack(codes_RKB[r], out_1KB.shape[-1])).mul_(scale_RK1[r]))
            total_KB.mul_(weight)


def lane_sum(x_RKB: Tensor) -> Tensor:
    """[R, K, 1]: element i in partial sum i % 64, in order; then sum k takes in sum k + half for half = 32, ..., 1."""
    size = x_RKB.shape[-1]
    sums_RKL = x_RKB.new_zeros((*x_RKB.shape[:2], _LANES))
    for i in range(0, size, _LANES):
        lanes = min(_LANES, size - i)
        sums_RKL[..., :lanes].add_(x_RKB[..., i : i + lanes])
    half = _LANES // 2
    while half:
        sums_RKL = sums_RKL[..., :half] + sums_RKL[..., half : 2 * half]
        half //= 2
    return sums_RKL


def pack_bits(bits_RKB: Tensor) -> Tensor:
    """[..., B] bool as [..., ceil(B / 8)] uint8, the first in the lowest bit."""
    rest = -bits_RKB.shape[-1] % 8
    padded = torch.nn.functional.pad(bits_RKB, (0, rest)) if rest else bits_RKB.contiguous()
    return (padded.view(torch.int64) * _GATHER >> 56).bitwise_and_(255).to(torch.uint8)


def _unpack(codes: Tensor, n: int) -> Tensor:
    """[..., n] int8: 1 where the bit is clear, -1 where it is set."""
    return _table(codes.device)[codes.to(torch.int32)].view(torch.int8)[..., :n]


@functools.cache
def _table(device: torch.device) -> Tensor:
    """[256] int64: the eight signs of each byte."""
    bits = torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu") & 1
    return (1 - 2 * bits).to(torch.int8).view(torch.int64).flatten().to(device)

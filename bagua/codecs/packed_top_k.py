"""packed_top_k: the largest elements of each block, 8 bits for an index of 12 and 2 bits for a value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from bagua.codecs.base import Codec
from bagua.codecs.chunks import pad4
from bagua.codecs.sign_torch import lane_sum, pack_bits
from bagua.codecs.top_k import TopK

__all__ = ["PackedTopK"]

_HEADER = 4  # bytes: two bfloat16
_NAN = 0x7FC0  # of bfloat16


@dataclass(frozen=True)
class PackedTopK(Codec):
    """The elements of largest magnitude of each block, with 2 bits for each value; the others decode to zero.

    `top_k` selects: a block of m elements keeps exactly k = max(1, ceil(ratio * m)), of equal magnitudes the ones at
    lower indices. A value is a sign and one of two magnitudes, which are sent once for each block: with mu the mean
    magnitude of the kept elements, `high` is the mean of those above mu, `low` the mean of the others, both rounded to
    bfloat16. Where zeros are kept, mu is 0, so that they are exact. Meant for use with error feedback, which sends the
    rest later on.

    Where a kept element is a NaN or an infinity, or where a mean overflows, all kept elements of its block decode to
    NaN, so they stay visible. Rows of fp64 go through fp32.

    A wire row is the headers of all blocks (`low`, then `high`), then the codes of each block, then zeros up to a
    multiple of 4 bytes. The codes of a block of m elements are, each filled up to whole bytes, the first bit lowest:

    - the upper bits of the indices in the block (Elias-Fano): k + (m - 1 >> l) bits, of which bit i + (index_i >> l)
      is set for the k ascending indices, i = 0, 1, ..., and l = floor(log2(m / k));
    - l planes of k bits: bit 0, 1, ..., l - 1 of each index;
    - a plane of signs (1 = negative) and one of magnitudes (1 = `high`).

    Args:
        ratio: the part of the elements to keep, 0 < ratio <= 1, times the length of the block, rounded up.
        block: elements of a block.

    Bytes:
        For each block of m elements `4 + ceil((k + (m - 1 >> l)) / 8) + (l + 2) * ceil(k / 8)`, padded to a multiple of
        4 for the row. With the defaults, 64 of 4096, a block takes 84 bytes: 0.164 bits for each element of the row.

    Raises:
        ValueError: an option is not as above; a wire does not have k ascending indices in each block (on a CPU; on a
            GPU damaged wires decode to unspecified numbers).

    Source:
        arXiv:2508.15706 (SparseLoCo, section 3: Top-k of chunks of 4096 elements, 2-bit values). The paper counts 12
        bits for an index and 2 for a value, 0.219 bits for each element.
    Differs: indices are sent in ascending order, which makes 8 bits enough (Elias-Fano). The two magnitudes are means
        of this block, not of the whole tensor.

    Examples:
        >>> codec = bagua.codecs.PackedTopK(ratio=1 / 32)
        >>> wire = codec.encode(inputs)
        >>> decoded = codec.decode(wire, inputs.shape[1])
    """

    name: ClassVar[str] = "packed_top_k"
    linear: ClassVar[bool] = False
    lossless: ClassVar[bool] = False

    ratio: float = 1 / 64
    block: int = 4096

    def __post_init__(self) -> None:
        """Raise ValueError unless 0 < ratio <= 1 and `block` is a positive int."""
        if type(self.block) is not int or self.block < 1:
            raise ValueError(f"block must be a positive int, got {self.block!r}")
        _ = self._selection

    @cached_property
    def _selection(self) -> TopK:
        return TopK(self.ratio, self.block)

    @property
    def drops(self) -> bool:
        """Unless all elements are kept."""
        return self.ratio < 1

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """Exact bytes of one row, see `Codec.wire_bytes`."""
        if n >= 2**31:
            raise ValueError(f"packed_top_k rows must have fewer than 2**31 elements, got {n}")
        return pad4(sum(group.blocks * (_HEADER + group.code_bytes) for group in self._groups(n)))

    def _groups(self, n: int) -> Iterator[_Group]:
        """The whole blocks of a row, then the ragged one."""
        whole, rest = divmod(n, self.block)
        head = kept = 0
        codes = _HEADER * (whole + bool(rest))
        for first, count, size in ((0, whole, self.block), (whole * self.block, int(rest > 0), rest)):
            if count:
                group = _Group(first, count, size, max(1, math.ceil(self.ratio * size)), kept, head, codes)
                yield group
                head, kept, codes = head + count * _HEADER, kept + count * group.k, codes + count * group.code_bytes

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        rows, n = x_RN.shape
        sparse_RW = self._selection.encode(x_RN)
        half, end = sparse_RW.shape[1] // 2, 0
        index_RT, value_RT = sparse_RW[:, :half].view(torch.int32), sparse_RW[:, half:].view(torch.float32)
        for g in self._groups(n):
            starts_K1 = torch.arange(g.first, g.first + g.blocks * g.size, g.size, device=x_RN.device)[:, None]
            index_RKk = index_RT[:, g.kept : g.kept + g.blocks * g.k].unflatten(1, (g.blocks, g.k)) - starts_K1
            header_RK2, sign_RKk, high_RKk = _quantised(
                value_RT[:, g.kept : g.kept + g.blocks * g.k].unflatten(1, (g.blocks, g.k))
            )
            upper_RKU = torch.zeros((rows, g.blocks, g.upper_bits), dtype=torch.bool, device=x_RN.device)
            upper_RKU.scatter_(2, (index_RKk >> g.low_bits) + torch.arange(g.k, device=x_RN.device), True)
            planes = [index_RKk >> bit & 1 != 0 for bit in range(g.low_bits)]
            codes = [pack_bits(bits) for bits in (upper_RKU, *planes, sign_RKk, high_RKk)]
            end = g.codes + g.blocks * g.code_bytes
            wire_RW[:, g.codes : end].copy_(torch.cat(codes, 2).flatten(1))
            header = header_RK2.contiguous().view(torch.uint8).flatten(1)
            wire_RW[:, g.head : g.head + g.blocks * _HEADER].copy_(header)
        wire_RW[:, end:].zero_()

    def _decode(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        self._selection.decode(self._unpacked(wire_RW, out_RN.shape[1]), out_RN.shape[1], out=out_RN)

    def _encode_feedback(self, x_RN: Tensor, residual_RN: Tensor, wire_RW: Tensor) -> None:
        self._encode(residual_RN.add_(x_RN), wire_RW)
        sparse_RW = self._unpacked(wire_RW, x_RN.shape[1])
        half = sparse_RW.shape[1] // 2
        at_RT = sparse_RW[:, :half].view(torch.int32).to(torch.int64)
        sent_RT = sparse_RW[:, half:].view(torch.float32).to(residual_RN.dtype)
        residual_RN.scatter_(1, at_RT, residual_RN.gather(1, at_RT).sub_(sent_RT))
        residual_RN.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _decode_mean(self, wire_RW: Tensor, out_N: Tensor, weight: float) -> None:
        n = out_N.shape[0]
        self._selection.decode_mean(self._unpacked(wire_RW, n), n, out_N, weight)

    def _unpacked(self, wire_RW: Tensor, n: int) -> Tensor:
        """The rows as `top_k` has them: indices in the row, then values."""
        rows, device = wire_RW.shape[0], wire_RW.device
        sparse_RW = torch.empty((rows, self._selection.wire_bytes(n)), dtype=torch.uint8, device=device)
        half = sparse_RW.shape[1] // 2
        index_RT, value_RT = sparse_RW[:, :half].view(torch.int32), sparse_RW[:, half:].view(torch.float32)
        for g in self._groups(n):
            header = wire_RW[:, g.head : g.head + g.blocks * _HEADER].contiguous()
            levels_RK2 = header.view(torch.bfloat16).unflatten(1, (g.blocks, 2)).to(torch.float32)
            codes_RKb = wire_RW[:, g.codes : g.codes + g.blocks * g.code_bytes].unflatten(1, (g.blocks, g.code_bytes))
            upper_RKb, planes_RKb = codes_RKb.split((g.upper_bytes, g.code_bytes - g.upper_bytes), 2)
            set_RKU = _bits(upper_RKb)
            # The places of the set bits in order; if there are too few, those of clear bits follow.
            place_RKk = set_RKU.argsort(dim=2, descending=True, stable=True)[..., : g.k]
            index_RKk = place_RKk.sub_(torch.arange(g.k, device=device)) << g.low_bits
            *lower, sign_RKk, high_RKk = (_bits(plane)[..., : g.k] for plane in planes_RKb.chunk(g.low_bits + 2, 2))
            for bit, plane in enumerate(lower):
                index_RKk |= plane.to(torch.int64) << bit
            if device.type == "cpu":
                _check(set_RKU, index_RKk, g)
            index_RKk.clamp_(0, g.size - 1)
            starts_K1 = torch.arange(g.first, g.first + g.blocks * g.size, g.size, device=device)[:, None]
            index_RT[:, g.kept : g.kept + g.blocks * g.k].copy_((index_RKk + starts_K1).flatten(1))
            magnitude_RKk = torch.where(high_RKk != 0, levels_RK2[..., 1:], levels_RK2[..., :1])
            signed_RKk = torch.where(sign_RKk != 0, -magnitude_RKk, magnitude_RKk)
            value_RT[:, g.kept : g.kept + g.blocks * g.k].copy_(signed_RKk.flatten(1))
        return sparse_RW


class _Group(NamedTuple):
    """`blocks` blocks of `size` elements, from element `first` on, `k` kept of each.

    `kept` elements of the row are kept before them; `head` and `codes` are the bytes where their headers and codes
    begin.
    """

    first: int
    blocks: int
    size: int
    k: int
    kept: int
    head: int
    codes: int

    @property
    def low_bits(self) -> int:
        """Bits of an index that are sent as planes."""
        return (self.size // self.k).bit_length() - 1

    @property
    def upper_bits(self) -> int:
        """Bits in which the upper bits of all indices are sent."""
        return self.k + (self.size - 1 >> self.low_bits)

    @property
    def upper_bytes(self) -> int:
        """Bytes of these."""
        return -(-self.upper_bits // 8)

    @property
    def code_bytes(self) -> int:
        """Bytes of a block without its header."""
        return self.upper_bytes + (self.low_bits + 2) * -(-self.k // 8)


def _quantised(value_RKk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both magnitudes [R, K, 2] as the bits of bfloat16; which values are negative, and which of the larger one."""
    size_RKk = value_RKk.abs()
    mean_RK1 = _mean(size_RKk, torch.ones_like(size_RKk))
    high_RKk = size_RKk > torch.where(size_RKk.amin(2, keepdim=True) == 0, 0.0, mean_RK1)
    levels_RK2 = torch.cat([_mean(size_RKk, ~high_RKk), _mean(size_RKk, high_RKk)], 2).to(torch.bfloat16)
    lost_RK1 = ~(mean_RK1.isfinite() & levels_RK2.isfinite().all(2, keepdim=True))
    header_RK2 = levels_RK2.view(torch.int16).masked_fill(lost_RK1, _NAN)
    return header_RK2, value_RKk.signbit() & ~lost_RK1, high_RKk & ~lost_RK1


def _mean(size_RKk: Tensor, chosen_RKk: Tensor) -> Tensor:
    """[R, K, 1]: the mean of the chosen ones, summed in the order of `lane_sum`; 0 where none is."""
    count_RK1 = lane_sum(chosen_RKk.to(torch.float32))
    return lane_sum(torch.where(chosen_RKk != 0, size_RKk, 0.0)) / count_RK1.clamp(min=1.0)


def _bits(bytes_RKb: Tensor) -> Tensor:
    """[R, K, 8 * b] uint8: the bits, the lowest of each byte first."""
    at = torch.arange(8, dtype=torch.uint8, device=bytes_RKb.device)
    return (bytes_RKb[..., None] >> at & 1).flatten(2)


def _check(set_RKU: Tensor, index_RKk: Tensor, group: _Group) -> None:
    """Raise ValueError unless the wires of a group of blocks are such as `encode` makes them."""
    counts_RK = set_RKU.sum(2, dtype=torch.int32)
    ascending = bool((index_RKk.diff(dim=2) > 0).all())
    within = not index_RKk.numel() or (int(index_RKk.min()) >= 0 and int(index_RKk.max()) < group.size)
    if not (ascending and within and bool((counts_RK == group.k).all())):
        raise ValueError(f"wire_RW does not hold {group.k} ascending indices in 0..{group.size - 1} for each block")

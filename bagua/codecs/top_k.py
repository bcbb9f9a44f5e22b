"""top_k: the elements of largest magnitude."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bagua.codecs import backends
from bagua.codecs.base import Codec
from bagua.codecs.chunks import chunks, sum_dtype
from bagua.codecs.layout import anywhere

__all__ = ["TopK"]

_SAMPLE = 1 << 15  # elements of a row that are looked at to guess which of all matter
_SMALL = 1 << 16  # rows below it are sorted out at once


@dataclass(frozen=True)
class TopK(Codec):
    """The elements of largest magnitude as (index, value); the others decode to zero.

    A row of n elements keeps exactly k = max(1, ceil(ratio * n)) of them; of equal magnitudes the ones at
    lower indices. Infinities count as more than any number and NaN as more than infinities (NaN among
    themselves by their bits), so they travel and stay visible. Rows of fp64 go through fp32. Meant for use
    with error feedback, which sends the rest later on.

    A wire row is the indices within the row as int32, ascending, then their values as fp32. With
    blocks, each keeps the k of its own length, so that every part of a row is represented.

    Args:
        ratio: the part of the elements to keep, 0 < ratio <= 1, times n rounded up; larger costs bytes.
        block: elements of a block, of which the largest are kept; None: the whole row.

    Bytes:
        `8 * k`, with blocks 8 times the sum of their k; more than the elements themselves if ratio > 1/2.

    Raises:
        ValueError: an option is not as above, or a row is longer than int32 counts.

    Source:
        arXiv:1704.05021, section 3 (gradient dropping); exact selection instead of a sampled threshold.

    Examples:
        >>> codec = bagua.codecs.TopK(ratio=0.1)
        >>> wire = codec.encode(inputs)
        >>> decoded = codec.decode(wire, inputs.shape[1])
    """

    name: ClassVar[str] = "top_k"
    linear: ClassVar[bool] = False
    lossless: ClassVar[bool] = False

    ratio: float = 0.01
    block: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless 0 < ratio <= 1 and `block` is a positive int or None."""
        if type(self.ratio) not in (float, int) or not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be a number with 0 < ratio <= 1, got {self.ratio!r}")
        if self.block is not None and (type(self.block) is not int or self.block < 1):
            raise ValueError(f"block must be a positive int or None (the whole row), got {self.block!r}")

    @property
    def drops(self) -> bool:
        """Unless all elements are kept."""
        return self.ratio < 1

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """Exact bytes of one row, see `Codec.wire_bytes`."""
        if n >= 2**31:
            raise ValueError(f"top_k rows must have fewer than 2**31 elements, got {n}")
        return 8 * sum(count * self._kept(size) for _, count, size in self._groups(n))

    def _kept(self, n: int) -> int:
        return max(1, math.ceil(self.ratio * n))

    def _groups(self, n: int) -> Iterator[tuple[int, int, int]]:
        """First element, number and size of the whole blocks, then of the ragged one."""
        block = self.block or max(n, 1)
        whole, rest = divmod(n, block)
        if whole:
            yield 0, whole, block
        if rest:
            yield whole * block, 1, rest

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        kernels, n = backends.kernels(x_RN.device).top_k, x_RN.shape[1]
        if kernels is not None:
            block = self.block or n
            kernels.encode(x_RN.to(torch.float32), wire_RW, block, self._kept(block), self._kept(n % block))
            return
        index_RT, value_RT = _parts(wire_RW)
        at = 0
        for first, count, size in self._groups(x_RN.shape[1]):
            k = self._kept(size)
            # On CPU many blocks at once would need large scratch.
            for lo, hi in chunks(count * size, size, x_RN.device):
                part_RC, num = x_RN[:, first + lo : first + hi].to(torch.float32), (hi - lo) // size
                at_RKk = _largest(part_RC.unflatten(1, (num, size)), k)
                at_RT = at_RKk.add_(torch.arange(0, hi - lo, size, device=x_RN.device)[:, None]).flatten(1)
                end = at + num * k
                value_RT[:, at:end].copy_(part_RC.gather(1, at_RT))
                index_RT[:, at:end].copy_(at_RT.add_(first + lo))
                at = end

    def _decode(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        index_RT, value_RT = _parts(wire_RW)
        out_RN.zero_().scatter_(1, index_RT.to(torch.int64), value_RT.to(out_RN.dtype))

    def _encode_feedback(self, x_RN: Tensor, residual_RN: Tensor, wire_RW: Tensor) -> None:
        self._encode(residual_RN.add_(x_RN), wire_RW)
        index_RT, value_RT = _parts(wire_RW)
        # What is sent is fp32, so of fp64 something may be left; what is not finite is sent first.
        at_RT, sent_RT = index_RT.to(torch.int64), value_RT.to(residual_RN.dtype)
        residual_RN.scatter_(1, at_RT, residual_RN.gather(1, at_RT).sub_(sent_RT))
        if anywhere(~value_RT.isfinite()):
            residual_RN.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _decode_mean(self, wire_RW: Tensor, out_N: Tensor, weight: float) -> None:
        kernels = backends.kernels(wire_RW.device).top_k
        if kernels is not None and out_N.dtype == torch.float32:
            kernels.decode_mean(wire_RW, weight, out_N)
            return
        wide = sum_dtype(out_N.dtype)
        total_N = out_N.zero_() if out_N.dtype == wide else torch.zeros_like(out_N, dtype=wide)
        for index_T, value_T in zip(*_parts(wire_RW), strict=True):
            at_T = index_T.to(torch.int64)  # no index twice in a row
            total_N.scatter_(0, at_T, total_N.gather(0, at_T).add_(value_T))
        total_N.mul_(weight)
        if total_N is not out_N:
            out_N.copy_(total_N)


def _parts(wire_RW: Tensor) -> tuple[Tensor, Tensor]:
    """The indices [R, T] int32 and the values [R, T] fp32 of wire rows, both views."""
    half = wire_RW.shape[1] // 2
    return wire_RW[:, :half].view(torch.int32), wire_RW[:, half:].view(torch.float32)


def _largest(x_RKB: Tensor, k: int) -> Tensor:
    """[R, K, k] int64: where the k largest of each block are, ascending."""
    if x_RKB.device.type != "cpu" or x_RKB.shape[-1] < _SMALL:
        return _largest_at_once(x_RKB, k)
    return torch.stack([_largest_of_long(x_B, k) for x_B in x_RKB.flatten(0, 1)]).unflatten(0, x_RKB.shape[:2])


def _magnitudes(x: Tensor) -> Tensor:
    """int32 in the order of |x|, infinities and NaN last."""
    return x.view(torch.int32) & 0x7FFFFFFF


def _largest_at_once(x_RKB: Tensor, k: int) -> Tensor:
    """By one number for magnitude and index that no two elements share: the same on all devices."""
    order_RKB = _magnitudes(x_RKB).to(torch.int64) << 32
    order_RKB -= torch.arange(x_RKB.shape[-1], device=x_RKB.device)
    return order_RKB.topk(k, sorted=False).indices.sort().values


def _largest_of_long(x_B: Tensor, k: int) -> Tensor:
    """On CPU, where selecting among few is what is fast: those above a guess from a sample."""
    at_C = _above(x_B, _guess(x_B, k))
    if at_C.numel() < k:  # the sample was no good
        at_C = _above(x_B, 0)
    keys_C = _magnitudes(x_B[at_C])
    least = keys_C.kthvalue(keys_C.numel() - k + 1).values
    more_C, same_C = keys_C > least, keys_C == least
    wanted_C = more_C | (same_C & (same_C.cumsum(0) <= k - more_C.sum()))
    return at_C[wanted_C]


def _guess(x_B: Tensor, k: int) -> int:
    """A magnitude that most likely at least k elements reach, and not many more."""
    sample_S = _magnitudes(x_B[:: x_B.shape[0] // _SAMPLE | 1])
    share = k * sample_S.numel() / x_B.shape[0]
    rank = math.ceil(share + 4 * math.sqrt(share) + 4)
    if rank >= sample_S.numel():
        return 0
    return int(sample_S.kthvalue(sample_S.numel() - rank + 1).values)


def _above(x_B: Tensor, least: int) -> Tensor:
    """[C] int64: where the magnitude is at least `least`, ascending."""
    if least == 0:
        return torch.arange(x_B.shape[0], device=x_B.device)
    found = []
    for lo, hi in chunks(x_B.shape[0], 8, x_B.device):
        reached_C = _magnitudes(x_B[lo:hi]) >= least
        found.append(_where(reached_C).add_(lo))
    return torch.cat(found)


def _where(mask_C: Tensor) -> Tensor:
    """`mask.nonzero()`, faster where little is set: eight at a time first."""
    if mask_C.shape[0] % 8:
        return mask_C.nonzero()[:, 0]
    words = mask_C.view(torch.int64).nonzero()
    at_WE = words * 8 + torch.arange(8, device=words.device)
    return at_WE[mask_C.view(-1, 8)[words[:, 0]]]

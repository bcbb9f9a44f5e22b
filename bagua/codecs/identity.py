"""Identity: no compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bagua.codecs.base import Codec
from bagua.codecs.checks import check_dtype, check_rows
from bagua.codecs.chunks import pad4
from bagua.codecs.mean import mean_of_rows

__all__ = ["Identity"]


@dataclass(frozen=True)
class Identity(Codec):
    """No compression: the bytes of the elements.

    Bytes:
        `n * itemsize`, padded to a multiple of 4. A wire must be decoded to the dtype that was encoded.

    Examples:
        >>> codec = bagua.codecs.Identity()
        >>> wire = codec.encode(inputs)
        >>> decoded = codec.decode(wire, inputs.shape[1])
    """

    name: ClassVar[str] = "identity"
    linear: ClassVar[bool] = True
    lossless: ClassVar[bool] = True

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """Exact bytes of one row, see `Codec.wire_bytes`."""
        return pad4(n * dtype.itemsize)

    def wire_dtype(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        """The dtype of the elements."""
        check_dtype("dtype", dtype)
        return dtype

    def encode(self, x_RN: Tensor, out: Tensor | None = None) -> Tensor:
        """Encode each row, see `Codec.encode`; without `out` as a view of `x_RN` where possible."""
        check_rows("x_RN", x_RN)
        itemsize = x_RN.element_size()
        aligned = all(bytes_ % 4 == 0 for bytes_ in (x_RN.shape[1] * itemsize, x_RN.stride(0) * itemsize))
        if out is None and aligned and x_RN.storage_offset() * itemsize % 4 == 0 and x_RN.stride(1) == 1:
            return x_RN.detach().view(torch.uint8)
        return super().encode(x_RN, out)

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        used = x_RN.shape[1] * x_RN.element_size()
        wire_RW[:, :used].copy_(_bytes(x_RN))
        if used < wire_RW.shape[1]:
            wire_RW[:, used:].zero_()

    def _decode(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        _bytes(out_RN).copy_(wire_RW[:, : out_RN.shape[1] * out_RN.element_size()])

    def _decode_mean(self, wire_RW: Tensor, out_N: Tensor, weight: float) -> None:
        used_RW = wire_RW[:, : out_N.shape[0] * out_N.element_size()]
        size = out_N.element_size()
        if used_RW.storage_offset() % size or (used_RW.shape[0] > 1 and used_RW.stride(0) % size):
            # 8-byte elements in a 4-byte aligned wire
            used_RW = used_RW.clone(memory_format=torch.contiguous_format)
        mean_of_rows(used_RW.view(out_N.dtype), out_N, weight)


def _bytes(x_RN: Tensor) -> Tensor:
    """[R, N] of any dtype as [R, N * itemsize] uint8, the same memory."""
    return x_RN.as_strided(x_RN.shape, (x_RN.stride(0), 1)).view(torch.uint8)

"""bf16 and fp16: casts to 2 bytes per element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bagua.codecs.base import Codec
from bagua.codecs.checks import check_dtype
from bagua.codecs.chunks import pad4
from bagua.codecs.mean import mean_of_rows

__all__ = ["Bf16", "Fp16"]


@dataclass(frozen=True)
class _Half(Codec):
    """A cast to `half`. Wires may be summed as tensors of that dtype.

    Bytes:
        `2 * n`, padded to a multiple of 4.
    """

    linear: ClassVar[bool] = True
    lossless: ClassVar[bool] = False
    half: ClassVar[torch.dtype]

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """Exact bytes of one row, see `Codec.wire_bytes`."""
        return pad4(2 * n)

    def wire_dtype(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        """The half dtype, whatever was encoded."""
        check_dtype("dtype", dtype)
        return self.half

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        n = x_RN.shape[1]
        half_RN = wire_RW.view(self.half)
        half_RN[:, :n].copy_(x_RN)
        if n < half_RN.shape[1]:
            half_RN[:, n:].zero_()

    def _decode(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        out_RN.copy_(wire_RW.view(self.half)[:, : out_RN.shape[1]])

    def _decode_mean(self, wire_RW: Tensor, out_N: Tensor, weight: float) -> None:
        mean_of_rows(wire_RW.view(self.half)[:, : out_N.shape[0]], out_N, weight)


@dataclass(frozen=True)
class Bf16(_Half):
    """Cast to bfloat16: the range of fp32, 8 bits of precision.

    Examples:
        >>> codec = bagua.codecs.Bf16()
        >>> wire = codec.encode(inputs)
        >>> decoded = codec.decode(wire, inputs.shape[1])
    """

    name: ClassVar[str] = "bf16"
    half: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True)
class Fp16(_Half):
    """Cast to float16: 11 bits of precision; beyond 65504 the wire holds an infinity, below 6e-8 a zero.

    Examples:
        >>> codec = bagua.codecs.Fp16()
        >>> wire = codec.encode(inputs)
        >>> decoded = codec.decode(wire, inputs.shape[1])
    """

    name: ClassVar[str] = "fp16"
    half: ClassVar[torch.dtype] = torch.float16

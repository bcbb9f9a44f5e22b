"""Which reductions are compressed, and by what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.backend.names import Backend

__all__ = ["Reduction", "compressed"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # float64 is asked for where digits count


@dataclass(frozen=True)
class Reduction:
    """A sum or mean.

    Attributes:
        average: mean if true, else sum.
        factor: what the terms are multiplied with.
    """

    average: bool
    factor: float = 1.0

    @classmethod
    def of(cls, op: Any) -> Reduction | None:
        """Read a `torch.distributed.ReduceOp`; None if it is neither AVG nor SUM nor PREMUL_SUM."""
        if op == dist.ReduceOp.AVG:
            return cls(True)
        if op == dist.ReduceOp.SUM:
            return cls(False)
        if op == dist.ReduceOp.PREMUL_SUM and hasattr(op, "__getstate__"):
            return cls(False, float(op.__getstate__()[1]))  # how it pickles: (kind, factor)
        return None


def compressed(spec: Backend, x: Tensor, rows: int, op: Any) -> Reduction | None:
    """The reduction of `rows` rows like `x`, if it is compressed. Reads only what is alike on all ranks."""
    if x.dtype not in _DTYPES or x.layout != torch.strided or spec.codec.lossless or x.numel() == 0:
        return None
    nbytes = x.numel() * x.element_size()
    if rows * nbytes < spec.min_bytes or spec.codec.wire_bytes(x.numel(), x.dtype) >= nbytes:
        return None
    return Reduction.of(op)

"""Reusable scratch memory: allocating a fresh 100 MB tensor costs more than a codec."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Buffers"]


class Buffers:
    """Named flat buffers that grow on demand and are never given back before `clear`.

    One set belongs to one lane. A lane runs one exchange at a time, so exchanges of different buckets may share
    a name; two tensors alive at once within one exchange must not.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a contiguous tensor of `shape` over the buffer `name`; its content is whatever was left there."""
        numel = math.prod(shape)
        key = (name, dtype, device)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < numel:
            flat = torch.empty(numel, dtype=dtype, device=device)
            self._flat[key] = flat
        return flat[:numel].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        # A copy: a lane's thread may add one meanwhile.
        return sum(flat.numel() * flat.element_size() for flat in list(self._flat.values()))

    def clear(self) -> None:
        """Give all memory back."""
        self._flat.clear()

"""How codecs cut rows: chunks that fit a cache, wires of whole 4-byte words, the dtype of sums."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["CPU_CHUNK", "chunks", "pad4", "sum_dtype"]

# Elements that a CPU loop over chunks handles at once: the scratch of one chunk stays in a core's cache.
CPU_CHUNK = 1 << 18


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunks(n: int, block: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges that cover `n` elements, whole blocks each: one range, except on CPU."""
    size = max(CPU_CHUNK // block, 1) * block if device.type == "cpu" else max(n, 1)
    for lo in range(0, n, size):
        yield lo, min(lo + size, n)


def pad4(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of 4."""
    return (num_bytes + 3) // 4 * 4

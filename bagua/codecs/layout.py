"""Memory layout of a block codec's encoded rows, with views for the eager kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Layout", "anywhere", "header_floats"]


@dataclass(frozen=True)
class Layout:
    """The fixed sizes of a block codec; `name` is that of its kernels."""

    name: str
    header_bytes: int  # of a block; fp32 numbers
    code_bits: int  # of an element

    def code_bytes(self, n: int) -> int:
        """Bytes of the codes of `n` elements that begin at a block."""
        return -(-n * self.code_bits // 8)

    def blocks(
        self, x_RC: Tensor, wire_RW: Tensor, head: int, codes: int, block: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Headers [R, bytes], elements [R, K, B], codes [R, K, bytes] of the whole blocks, then of the ragged one."""
        n = x_RC.shape[1]
        whole, rest = divmod(n, block)
        for first, count, size in ((0, whole, block), (whole, min(rest, 1), rest)):
            if not count:
                continue
            width = self.code_bytes(size)
            at, start = head + first * self.header_bytes, codes + self.code_bytes(first * block)
            header = wire_RW[:, at : at + count * self.header_bytes]
            x_RKB = x_RC[:, first * block : first * block + count * size].unflatten(1, (count, size))
            yield header, x_RKB, wire_RW[:, start : start + count * width].unflatten(1, (count, width))


def header_floats(header: Tensor, count: int) -> Tensor:
    """[R, K, count] fp32: the headers of `count` numbers each."""
    aligned = header.clone(memory_format=torch.contiguous_format)
    return aligned.view(torch.float32).unflatten(1, (-1, count))


def anywhere(mask: Tensor) -> bool:
    """Whether a rare case occurs. On a GPU always true, because asking would synchronise."""
    return mask.device.type != "cpu" or bool(mask.any())

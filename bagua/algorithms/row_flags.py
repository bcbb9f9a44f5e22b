"""Flags of rows, several in one number, whose sum over all ranks tells how many ranks have set each.

A row is an index of a tensor's first dimension, or the tensor if it has only one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.algorithms.base import Context

__all__ = ["as_rows", "counts_of", "num_rows", "pack"]

_EXACT = 1 << 24  # integers below are exact in fp32


def num_rows(tensor: Tensor) -> int:
    """K."""
    return tensor.shape[0] if tensor.dim() > 1 else 1


def as_rows(tensor: Tensor) -> Tensor:
    """[K, M]; a copy if the rows are not one after the other in memory."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)


def pack(ctx: Context, flags_K: Tensor) -> Tensor:
    """Pack flags into words to be summed: `floor(24 / log2(R + 1))` in each with R ranks.

    Shapes: flags_K: [K] bool; result: [W] fp32.
    """
    powers = _powers(ctx, flags_K.device)
    num = -(-len(flags_K) // len(powers))
    padded = torch.nn.functional.pad(flags_K, (0, num * len(powers) - len(flags_K))).view(num, len(powers))
    return (padded * powers).sum(1).float()


def counts_of(ctx: Context, words_W: Tensor, num: int) -> Tensor:
    """On how many ranks each of `num` flags was set, from the sum of all ranks' words.

    Shapes: words_W: [W] fp32; result: [num] int64.
    """
    powers, base = _powers(ctx, words_W.device), ctx.groups.size + 1
    return (words_W[:, None].long() // powers % base).view(-1)[:num]


def _powers(ctx: Context, device: torch.device) -> Tensor:
    """Weights of the flags of a word, whose sums over all ranks are exact."""

    def make() -> Tensor:
        values, base = [1], ctx.groups.size + 1
        while values[-1] * base * base <= _EXACT:
            values.append(values[-1] * base)
        return torch.tensor(values, device=device)

    return ctx.keep("powers of flags", make)

"""Rows of parameters for which no rank has a gradient: zero, whatever a codec makes of zeros."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bagua.algorithms.base import Bucket, Context
from bagua.codecs import Codec

__all__ = ["clear_idle_rows", "launch_used_rows", "loses_zeros", "note_used_rows"]

_EXACT = 1 << 24  # integers below are exact in fp32


def loses_zeros(*used: Codec) -> bool:
    """Whether one of the codecs decodes zeros to other numbers."""
    return not all(codec.keeps_zeros for codec in used)


@dataclass(eq=False)
class _Rows:
    """What this rank knows of one exchange.

    Attributes:
        own: of each bucket, [K] bool for K rows: whether this rank has something that is not zero there.
        words: all ranks' numbers, packed: [W] fp32.
        order: indices of the buckets in `words`.
    """

    own: dict[int, Tensor] = field(default_factory=dict)
    words: Tensor | None = None
    order: tuple[int, ...] = ()


def note_used_rows(ctx: Context, bucket: Bucket, parts: Sequence[Tensor | None]) -> None:
    """Note which rows of a bucket this rank has something to send for, before they are exchanged.

    A row is an index of a parameter's first dimension, or the parameter if it has only one: a token of an embedding, a
    unit of a layer, an expert of several in one tensor.

    Args:
        ctx: of the algorithm.
        bucket: of the parameters.
        parts: of each parameter what is sent, in its shape; None stands for zeros.
    """
    firsts: list[Tensor] = []
    parts = [part if part is None or part.layout is torch.strided else part.to_dense() for part in parts]
    for param, part in zip(bucket.params, parts, strict=True):
        rows = _num_rows(param)
        if part is None or not part.numel():
            firsts.append(torch.zeros(rows, dtype=param.dtype, device=param.device))
        else:
            firsts.append(part[(slice(None),) + (0,) * (part.dim() - 1)] if part.dim() > 1 else part.reshape(-1)[:1])
    used = torch.cat(firsts) != 0
    # Most gradients have something in the first place of each row. On a GPU asking so would wait for it.
    if used.device.type != "cpu" or not used.all():
        for mine, part in zip(used.split([len(each) for each in firsts]), parts, strict=True):
            if part is not None and part.numel() and not (mine.device.type == "cpu" and mine.all()):
                torch.any((part != 0).reshape(len(mine), -1), 1, out=mine)
    _rows(ctx).own[bucket.index] = used


def launch_used_rows(ctx: Context, buckets: Iterable[Bucket]) -> None:
    """Queue the sum over all ranks of what was noted of `buckets`; `ctx.wait` waits for it.

    Bytes: 4 for each `floor(24 / log2(R + 1))` rows with R ranks, in one small sum.
    """
    rows, base = _rows(ctx), ctx.groups.size + 1
    rows.order = tuple(bucket.index for bucket in buckets)
    flags = torch.cat([rows.own[index] for index in rows.order])
    powers = _powers(base, flags.device)
    padded = torch.nn.functional.pad(flags, (0, -len(flags) % len(powers))).view(-1, len(powers))
    rows.words = (padded * powers).sum(1).float()
    ctx.launch_sum(rows.words)


@torch.no_grad()
def clear_idle_rows(ctx: Context, bucket: Bucket, result_N: Tensor) -> None:
    """Set rows to zero for which no rank has sent anything, after `ctx.wait`.

    Args:
        ctx: of the algorithm.
        bucket: one of those of `launch_used_rows`.
        result_N: [N], of the exchange.
    """
    rows = _rows(ctx)
    assert rows.words is not None
    begin = sum(len(rows.own[index]) for index in rows.order[: rows.order.index(bucket.index)])
    num = len(rows.own[bucket.index])
    base = ctx.groups.size + 1
    powers = _powers(base, result_N.device)
    lo, hi = begin // len(powers), -(-(begin + num) // len(powers))
    counts = rows.words[lo:hi, None].long() // powers % base
    idle = counts.view(-1)[begin - lo * len(powers) :][:num] == 0
    if idle.device.type == "cpu" and not idle.any():
        return
    parts = bucket.split(result_N)
    for mine, part in zip(idle.split([_num_rows(param) for param in bucket.params]), parts, strict=True):
        if part.numel() and not (mine.device.type == "cpu" and not mine.any()):
            part.masked_fill_(mine.view(-1, *[1] * (part.dim() - 1)) if part.dim() else mine[0], 0)


def _num_rows(param: Tensor) -> int:
    return param.shape[0] if param.dim() > 1 else 1


def _powers(base: int, device: torch.device) -> Tensor:
    """Weights of the flags of a word, whose sums over all ranks are exact."""
    values = [1]
    while values[-1] * base * base <= _EXACT:
        values.append(values[-1] * base)
    return torch.tensor(values, device=device)


def _rows(ctx: Context) -> _Rows:
    return ctx.keep("used rows", _Rows)

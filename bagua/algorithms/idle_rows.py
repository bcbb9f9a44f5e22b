"""Rows and columns of parameters for which no rank has a gradient: zero, whatever a codec makes of zeros.

Source: docs/design/0023-rows-that-nobody-uses.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

from bagua.algorithms.base import Bucket, Context
from bagua.algorithms.row_flags import counts_of, num_rows, pack
from bagua.codecs import Codec

__all__ = ["clear_idle_rows", "launch_used_rows", "loses_zeros", "note_used_rows"]


def loses_zeros(*used: Codec) -> bool:
    """Whether one of the codecs decodes zeros to other numbers."""
    return not all(codec.keeps_zeros for codec in used)


@dataclass(eq=False)
class _Rows:
    """What this rank knows of one exchange.

    Attributes:
        own: of each bucket, [K] bool for K rows and columns: whether this rank has something that is not zero there.
        words: all ranks' numbers, packed: [W] fp32; None: nothing was launched since rows were cleared.
    """

    own: dict[int, Tensor] = field(default_factory=dict)
    words: Tensor | None = None


def note_used_rows(
    ctx: Context, bucket: Bucket, sent_N: Tensor | None = None, shown: Mapping[nn.Parameter, Tensor] | None = None
) -> None:
    """Note which rows and columns of a bucket this rank has something to send for, before they are exchanged.

    A row is an index of a parameter's first dimension, or the parameter if it has only one: a token of an embedding, a
    unit of a layer, an expert of several in one tensor. A column is an index of the second dimension: an input of a
    layer. On a device they are left out, as each parameter would take launches of its own.

    Args:
        ctx: of the algorithm.
        bucket: of the parameters.
        sent_N: [N] what is sent; None: the gradients, which may lie outside the bucket still.
        shown: tensors in the shapes of parameters; a row of zeros there has nothing to send either.
    """
    columns = list[Tensor]()
    shown = shown if shown and any(param in shown for param in bucket.params) else None
    if _runs_flat(bucket):
        used = _used_of_flat(ctx, bucket, bucket.flat if sent_N is None else sent_N)
        if shown:
            shown_N = torch.ones_like(bucket.flat)
            for param, part in zip(bucket.params, bucket.split(shown_N), strict=True):
                if param in shown:
                    part.copy_(shown[param])
            used &= _used_of_flat(ctx, bucket, shown_N)
    else:
        among = None
        if shown:
            ones = (param.new_ones(()).expand(param.shape) for param in bucket.params)
            among = _used_of_parts(bucket, [shown.get(*each) for each in zip(bucket.params, ones, strict=True)])
        parts = [param.grad for param in bucket.params] if sent_N is None else bucket.split(sent_N)
        used = _used_of_parts(bucket, parts, among)
        columns = _used_columns(bucket, parts, used)
    _rows(ctx).own[bucket.index] = torch.cat([used, *columns])


def launch_used_rows(ctx: Context, buckets: Sequence[Bucket]) -> None:
    """Queue the sum over all ranks of what was noted of `buckets`; `ctx.wait` waits for it.

    Bytes: 4 for each `floor(24 / log2(R + 1))` rows with R ranks, in one small sum.
    """
    rows = _rows(ctx)
    rows.words = pack(ctx, torch.cat([rows.own[bucket.index] for bucket in buckets]))
    ctx.launch_sum(rows.words)


@torch.no_grad()
def clear_idle_rows(
    ctx: Context,
    buckets: Sequence[Bucket],
    results: Sequence[Tensor],
    own: Callable[[Bucket], Tensor] | None = None,
) -> None:
    """Set rows to zero for which no rank has sent anything, after `ctx.wait`. A lost step may not have launched any.

    Args:
        ctx: of the algorithm.
        buckets: those of `launch_used_rows`.
        results: of each its [N], of the exchange.
        own: computes for a bucket the [N] whose rows are taken in place of zeros, equal on all ranks there.
    """
    rows = _rows(ctx)
    words, rows.words = rows.words, None
    if words is None:
        return
    idle = counts_of(ctx, words, sum(len(rows.own[bucket.index]) for bucket in buckets)) == 0
    begin = 0
    for bucket, result_N in zip(buckets, results, strict=True):
        num = len(rows.own[bucket.index])
        _clear(ctx, bucket, result_N, idle[begin : begin + num], own)
        begin += num


def _clear(
    ctx: Context, bucket: Bucket, result_N: Tensor, idle: Tensor, own: Callable[[Bucket], Tensor] | None
) -> None:
    if _runs_flat(bucket):
        idle_N = idle.repeat_interleave(_lengths(ctx, bucket), output_size=result_N.numel())
        if own is None:
            result_N.masked_fill_(idle_N, 0)
        else:
            result_N.copy_(torch.where(idle_N, own(bucket), result_N))
        return
    if not idle.any():
        return
    nums = _nums_of_rows(bucket)
    idle, columns = idle.split([sum(nums), len(idle) - sum(nums)])
    parts = bucket.split(result_N)
    if own is not None:
        for mine, part, instead in zip(idle.split(nums), parts, bucket.split(own(bucket)), strict=True):
            if part.dim() > 1:
                at = mine.nonzero()[:, 0]
                part.index_copy_(0, at, instead.index_select(0, at))
            elif mine[0]:
                part.copy_(instead)
    else:
        for mine, part in zip(idle.split(nums), parts, strict=True):
            if part.dim() > 1:
                part.index_fill_(0, mine.nonzero()[:, 0], 0)  # several times as fast as `masked_fill_`
            elif mine[0]:
                part.zero_()
    matrices = [part for part in parts if _has_columns(part)]
    for mine, part in zip(columns.split([part.shape[1] for part in matrices]), matrices, strict=True):
        if mine.any():  # a change of weights is zero there, too
            part.index_fill_(1, mine.nonzero()[:, 0], 0)


def _nums_of_rows(bucket: Bucket) -> list[int]:
    return [num_rows(param) for param in bucket.params]


def _runs_flat(bucket: Bucket) -> bool:
    """Whether rows are found in the bucket's memory: on a device, where a question of the host would wait.

    A row must be one range of it, which it is not if the first dimension is not the outermost in memory.
    """
    if bucket.params[0].device.type == "cpu":
        return False
    rows = zip(bucket.params, _nums_of_rows(bucket), strict=True)
    return all(param.dim() < 2 or num < 2 or param.stride(0) * num == param.numel() for param, num in rows)


def _used_of_flat(ctx: Context, bucket: Bucket, sent_N: Tensor) -> Tensor:
    counts = torch.nn.functional.pad((sent_N != 0).cumsum(0, dtype=torch.int32), (1, 0))
    lengths = _lengths(ctx, bucket)
    bounds = ctx.keep(f"bounds of rows {bucket.index}", lambda: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
    return counts[bounds].diff() != 0


def _used_of_parts(bucket: Bucket, parts: Sequence[Tensor | None], among_K: Tensor | None = None) -> Tensor:
    """None stands for zeros. Most gradients have something in the first place of each row.

    Args:
        among_K: other rows are not looked at, and count as not used.
    """
    nums, firsts = _nums_of_rows(bucket), list[Tensor]()
    parts = [part if part is None or part.layout is torch.strided else part.to_dense() for part in parts]
    for param, part, num in zip(bucket.params, parts, nums, strict=True):
        if part is None or not part.numel():
            firsts.append(torch.zeros(num, dtype=param.dtype, device=param.device))
        else:
            firsts.append(part[(slice(None),) + (0,) * (part.dim() - 1)] if part.dim() > 1 else part.reshape(-1)[:1])
    used = torch.cat(firsts) != 0
    if among_K is not None:
        used &= among_K
    unknown_K = ~used if among_K is None else among_K & ~used
    if not unknown_K.any():
        return used
    for mine, unknown, part in zip(used.split(nums), unknown_K.split(nums), parts, strict=True):
        if part is None or not part.numel() or not unknown.any():
            continue
        if part.dim() > 1:
            at = unknown.nonzero()[:, 0]
            rest = tuple(range(1, part.dim()))  # several times as fast as `any`
            if 2 * len(at) > len(mine):
                mine.logical_or_(torch.logical_or(part.amax(rest), part.amin(rest)).logical_and_(unknown))
            else:
                some = part.index_select(0, at)
                mine[at] = torch.logical_or(some.amax(rest), some.amin(rest))
        else:
            mine.fill_(bool(part.any()))
    return used


def _has_columns(param: Tensor) -> bool:
    return param.dim() > 1 and param.numel() > 0 and min(param.shape[:2]) > 1


def _used_columns(bucket: Bucket, parts: Sequence[Tensor | None], used_K: Tensor) -> list[Tensor]:
    """Of each parameter that has columns; most have something in each column of the first row that is used."""
    firsts, matrices = list[Tensor](), list[tuple[Tensor, Tensor | None]]()
    ends = list(accumulate(_nums_of_rows(bucket), initial=0))
    starts = torch.cat([used_K, used_K.new_zeros(1)])[torch.tensor(ends[:-1], device=used_K.device)].tolist()
    for i, (param, part) in enumerate(zip(bucket.params, parts, strict=True)):
        if not _has_columns(param):
            continue
        row: int | None = 0
        if not starts[i]:
            rows = used_K[ends[i] : ends[i + 1]]
            row = int(rows.int().argmax()) if rows.any() else None
        if part is None or row is None:
            part = None
            firsts.append(torch.zeros(param.shape[1], dtype=param.dtype, device=param.device))
        else:
            part = part if part.layout is torch.strided else part.to_dense()
            firsts.append(part[(row, slice(None)) + (0,) * (part.dim() - 2)])
        matrices.append((param, part))
    if not firsts:
        return []
    used = torch.cat(firsts) != 0
    columns = list(used.split([param.shape[1] for param, _ in matrices]))
    if used.all():
        return columns
    for mine, (_, part) in zip(columns, matrices, strict=True):
        if part is not None and not mine.all():
            rest = (0, *range(2, part.dim()))  # several times as fast as `any`
            torch.logical_or(part.amax(rest), part.amin(rest), out=mine)
    return columns


def _lengths(ctx: Context, bucket: Bucket) -> Tensor:
    """Elements of each row, [K] on the bucket's device."""

    def make() -> Tensor:
        pairs = zip(bucket.params, _nums_of_rows(bucket), strict=True)
        each = [param.numel() // num if num else 0 for param, num in pairs for _ in range(num)]
        return torch.tensor(each, device=bucket.params[0].device)

    return ctx.keep(f"lengths of rows {bucket.index}", make)


def _rows(ctx: Context) -> _Rows:
    return ctx.keep("used rows", _Rows)

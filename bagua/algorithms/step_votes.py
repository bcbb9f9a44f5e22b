"""On how many ranks each parameter has made the steps that its moments are inferred from, and each row had gradients.

An average shows what all ranks have moved. Where some of them made no step of a parameter, as it got no gradient there,
the mean step is not that of a mean gradient. A rank cannot see that in the average, so the ranks tell each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bagua.algorithms.base import Bucket, Context
from bagua.algorithms.row_flags import counts_of, pack

__all__ = ["launch_votes", "row_counts_of", "votes_of"]


@dataclass(eq=False)
class _Votes:
    """Of all buckets: [P + W] fp32, which holds numbers of ranks exactly, and where each bucket begins.

    Attributes:
        num: P, parameters.
        rows: of each bucket, [K] bool: this rank's flags, which the W words of all ranks belong to.
        counts: of each bucket, [K]: on how many ranks each was set; empty until asked for.
    """

    all: Tensor
    begins: dict[int, int]
    num: int = 0
    rows: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)


def launch_votes(
    ctx: Context, stepped: Iterable[Sequence[float]], rows: Sequence[Sequence[Tensor]] | None = None
) -> None:
    """Queue the sum over all ranks; `ctx.wait` waits for it.

    Args:
        ctx: of the algorithm.
        stepped: for each bucket and each parameter that counts, whether this rank has made the steps, or a number that
            tells how many; sums over the ranks have to be below 2^24.
        rows: for each bucket tensors [K] bool, whether this rank had a gradient in each of K rows.
    """
    flags = [list(each) for each in stepped]
    total = sum(map(len, flags))
    device = ctx.buckets[0].flat.device
    votes = ctx.keep("votes", lambda: _Votes(_zeros(0, device), {}))
    votes.num, words, none = total, _zeros(0, device), torch.zeros(0, dtype=torch.bool, device=device)
    if rows is not None:
        votes.rows = {bucket.index: torch.cat([none, *each]) for bucket, each in zip(ctx.buckets, rows, strict=True)}
        votes.counts.clear()
        words = pack(ctx, torch.cat(list(votes.rows.values())))
    if votes.all.numel() != total + len(words):
        votes.all = _zeros(total + len(words), device)
    begin = 0
    for bucket, each in zip(ctx.buckets, flags, strict=True):
        votes.begins[bucket.index] = begin
        begin += len(each)
    if total:
        votes.all[:total].copy_(
            torch.tensor([flag for each in flags for flag in each], dtype=torch.float32, device="cpu")
        )
        votes.all[total:].copy_(words)
        ctx.launch_sum(votes.all)


def votes_of(ctx: Context, bucket: Bucket, num: int) -> Tensor:
    """The sums over the ranks, as on how many ranks the steps were made, after `ctx.wait`.

    Shapes: result: [num] fp32, on the bucket's device.
    """
    votes = ctx.keep("votes", lambda: _Votes(_zeros(0, bucket.flat.device), {}))
    begin = votes.begins[bucket.index]
    return votes.all[begin : begin + num]


def row_counts_of(ctx: Context, bucket: Bucket) -> tuple[Tensor, Tensor]:
    """After `ctx.wait`: on how many ranks each row of a bucket had a gradient, and whether it had one here.

    Shapes: [K] int64 and [K] bool, on the bucket's device.
    """
    votes = ctx.keep("votes", lambda: _Votes(_zeros(0, bucket.flat.device), {}))
    if not votes.counts:
        nums = [len(flags) for flags in votes.rows.values()]
        all_counts = counts_of(ctx, votes.all[votes.num :], sum(nums)).split(nums)
        votes.counts.update(zip(votes.rows, all_counts, strict=True))
    return votes.counts[bucket.index], votes.rows[bucket.index]


def _zeros(num: int, device: torch.device) -> Tensor:
    return torch.zeros(num, dtype=torch.float32, device=device)

"""On how many ranks each parameter has made the steps that its moments are inferred from.

An average shows what all ranks have moved. Where some of them made no step of a parameter, as it got no gradient there,
the mean step is not that of a mean gradient. A rank cannot see that in the average, so the ranks tell each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bagua.algorithms.base import Bucket, Context

__all__ = ["launch_votes", "votes_of"]


@dataclass(eq=False)
class _Votes:
    """Of all buckets: [P] fp32, which holds numbers of ranks exactly, and where each bucket begins."""

    all: Tensor
    begins: dict[int, int]


def launch_votes(ctx: Context, stepped: Iterable[Sequence[bool]]) -> None:
    """Queue the sum over all ranks; `ctx.wait` waits for it.

    Args:
        ctx: of the algorithm.
        stepped: for each bucket and each parameter that counts, whether this rank has made the steps.
    """
    flags = [list(each) for each in stepped]
    total = sum(map(len, flags))
    device = ctx.buckets[0].flat.device
    votes = ctx.keep("votes", lambda: _Votes(torch.zeros(0, device=device), {}))
    if votes.all.numel() != total:
        votes.all = torch.zeros(total, device=device)
    begin = 0
    for bucket, each in zip(ctx.buckets, flags, strict=True):
        votes.begins[bucket.index] = begin
        begin += len(each)
    if total:
        votes.all.copy_(torch.tensor([flag for each in flags for flag in each], dtype=torch.float32))
        ctx.launch_sum(votes.all)


def votes_of(ctx: Context, bucket: Bucket, num: int) -> Tensor:
    """How many ranks have made the steps, after `ctx.wait`.

    Shapes: result: [num] fp32, on the bucket's device.
    """
    votes = ctx.keep("votes", lambda: _Votes(torch.zeros(0), {}))
    begin = votes.begins[bucket.index]
    return votes.all[begin : begin + num]

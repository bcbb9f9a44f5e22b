"""Emulates "async" with rounds that take a fixed number of steps, so that a run can be repeated bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import nn

from bagua.algorithms.base import Algorithm, Context, Exactness, Payload
from bagua.algorithms.second_moment import check_scalable, rescale_second_moments, set_up_second_moments
from bagua.exchanges import Exchange, mix

__all__ = ["DelayedAverage"]


@dataclass(frozen=True)
class DelayedAverage(Algorithm):
    """x_i <- x_i + (mean of snapshots - own snapshot), `delay` steps after all ranks took their snapshots.

    Real rounds of `async` end at moments that depend on time.

    Args:
        delay: steps from a snapshot to the moment at which its difference is added.
        every: steps from a snapshot to the next; at least `delay`.
        scale_second_moment: as that of `async`.
    """

    name: ClassVar[str] = "delayed"
    summary: ClassVar[str] = "async with rounds of fixed length"
    exactness: ClassVar[Exactness] = Exactness.PERIODIC
    payload_kind: ClassVar[Payload] = Payload.PARAM

    delay: int = 1
    every: int = 1
    scale_second_moment: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.delay <= self.every:
            raise ValueError(f"delay: expected 1 <= delay <= every, got {self.delay!r} and {self.every!r}")

    @cached_property
    def exchange(self) -> Exchange:
        """The mean of all ranks."""
        return mix("complete", "identity")

    def bytes_per_rank(self, n: int, size: int) -> float:
        """The exchange's, spread over the steps of a round."""
        return self.exchange.bytes_per_rank(n, size) / self.every

    def check(self, params: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """An optimizer must have second moments where they are to be corrected."""
        if self.scale_second_moment:
            check_scalable(optimizers)

    def setup(self, ctx: Context) -> None:
        """Prepare the exchange; the second moments at hand are taken as they are."""
        ctx.prepare(self.exchange)
        if self.scale_second_moment:
            set_up_second_moments(ctx)

    def on_step_end(self, ctx: Context) -> None:
        """In the order of `async`: second moments, the difference of a round that is over, the next snapshot."""
        if self.scale_second_moment:
            rescale_second_moments(ctx)
        if ctx.step >= self.delay and (ctx.step - self.delay) % self.every == 0:
            means = [ctx.scratch("mean", bucket).copy_(ctx.scratch("snapshot", bucket)) for bucket in ctx.buckets]
            for bucket, mean in zip(ctx.buckets, means, strict=True):
                ctx.launch(self.exchange, bucket, mean)
            ctx.wait()
            for bucket, mean in zip(ctx.buckets, means, strict=True):
                bucket.flat.add_(mean).sub_(ctx.scratch("snapshot", bucket))
        if ctx.step % self.every == 0:
            for bucket in ctx.buckets:
                ctx.scratch("snapshot", bucket).copy_(bucket.flat)

"""Emulates "async" with rounds that take a fixed number of steps, so that a run can be repeated bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from bagua import codecs
from bagua.algorithms.base import Algorithm, Context, Exactness, Payload
from bagua.algorithms.delayed_moments import DelayedMoments
from bagua.algorithms.feedback import fit_feedback
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
        scale_second_moment, codec, mean_moments: as those of `async`.
    """

    name: ClassVar[str] = "delayed"
    summary: ClassVar[str] = "async with rounds of fixed length"
    exactness: ClassVar[Exactness] = Exactness.PERIODIC
    payload_kind: ClassVar[Payload] = Payload.PARAM

    delay: int = 1
    every: int = 1
    scale_second_moment: bool = False
    codec: str = "identity"
    mean_moments: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.delay <= self.every:
            raise ValueError(f"delay: expected 1 <= delay <= every, got {self.delay!r} and {self.every!r}")

    @cached_property
    def exchange(self) -> Exchange:
        """The mean of all ranks, with error feedback where `async` has it."""
        feedback = not self.mean_moments and fit_feedback(None, codecs.get(self.codec))
        return mix("complete", self.codec, error_feedback=feedback)

    @property
    def _sends_changes(self) -> bool:
        return not codecs.get(self.codec).lossless

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
        for bucket in ctx.buckets if self._sends_changes else ():
            ctx.scratch("base", bucket).copy_(bucket.flat)
        if self.scale_second_moment:
            set_up_second_moments(ctx)
        self._moments(ctx)

    def _moments(self, ctx: Context) -> DelayedMoments | None:
        return ctx.keep("moments", lambda: DelayedMoments(ctx)) if self.mean_moments else None

    def on_step_begin(self, ctx: Context) -> None:
        """Moments are inferred from the optimizers' steps alone."""
        if (moments := self._moments(ctx)) is not None:
            moments.look_for_changes(ctx)

    def on_step_end(self, ctx: Context) -> None:
        """In the order of `async`: second moments, the difference of a round that is over, the next snapshot."""
        if self.scale_second_moment:
            rescale_second_moments(ctx)
        moments = self._moments(ctx)
        if moments is not None:
            moments.record(ctx)
        if ctx.step >= self.delay and (ctx.step - self.delay) % self.every == 0:
            means = [ctx.scratch("mean", bucket).copy_(ctx.scratch("snapshot", bucket)) for bucket in ctx.buckets]
            if self._sends_changes:
                for bucket, mean in zip(ctx.buckets, means, strict=True):
                    mean.sub_(ctx.scratch("base", bucket))
            for bucket, mean in zip(ctx.buckets, means, strict=True):
                ctx.launch(self.exchange, bucket, mean)
            ctx.wait()
            for bucket, mean in zip(ctx.buckets, means, strict=True):
                if self._sends_changes:
                    mean.copy_(ctx.scratch("base", bucket).add_(mean))
                mean.sub_(ctx.scratch("snapshot", bucket))
            if moments is not None:
                made = ctx.keep("made", list[Tensor]).pop()
                ctx.launch_sum(made.view(-1))
                ctx.wait()
                moments.infer(ctx, means, [ctx.scratch("snapshot", bucket) for bucket in ctx.buckets], made)
            for bucket, difference in zip(ctx.buckets, means, strict=True):
                bucket.flat.add_(difference)
        if ctx.step % self.every == 0:
            for bucket in ctx.buckets:
                ctx.scratch("snapshot", bucket).copy_(bucket.flat)
            if moments is not None:
                ctx.keep("made", list[Tensor]).append(moments.close(ctx))
        if moments is not None:
            moments.note_weights(ctx)

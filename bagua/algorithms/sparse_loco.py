"""SparseLoCo: local training, with sparse pseudo-gradients of 2 bits and a decaying error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from bagua import codecs
from bagua.algorithms.base import Algorithm, Bucket, Context, Exactness, LostStep, Payload
from bagua.algorithms.decentralized import check_interval
from bagua.algorithms.options import check_number
from bagua.algorithms.registry import register
from bagua.codecs import Codec
from bagua.exchanges import AllGather, Exchange

__all__ = ["SparseLoCo"]


@register
@dataclass(frozen=True)
class SparseLoCo(Algorithm):
    """Every H local steps the ranks exchange their largest changes, and keep the others for later rounds.

    With the anchor a, which is equal on all ranks, the residual e_r of rank r, and the weights s_r with which it began
    the round: e_r = decay e_r + (s_r - x_r); q_r = Q(e_r); e_r -= q_r; a -= lr * mean over ranks of q_r. Then the next
    round begins with x_r = s_r = a - keep e_r. Q keeps the largest elements of each block, in 2 bits. What is not sent
    stays in the residual, which takes the place of DiLoCo's outer momentum.

    In the paper keep is 0: all ranks begin a round with the anchor, and what a rank has learnt but not sent acts once
    it is sent. With keep > 0 a rank also trains on with a part of it, and ranks differ at all times, by residuals.

    The optimizers given to `distribute` are the inner ones and step with local gradients. The anchor starts as the
    weights at hand, which must be equal: after `distribute`, or after a synchronous algorithm in
    `Warmup(steps, "gradient_allreduce", "sparse_loco")`. All ranks must make the same number of optimizer steps.
    `bagua.average_parameters` makes the weights of all ranks equal; call it before the model is evaluated or saved.

    With `fault_tolerant` a round in which a rank is lost is repeated by the others, which keep anchor and residuals.
    The residual of a lost rank is lost. A rank that joins takes over weights and residual of another rank; what is
    counted twice by that decays.

    Args:
        communication_interval: H, inner steps between two rounds; the papers use 15 to 100.
        outer_lr: lr.
        decay: factor of the residual in each round, 0 <= decay <= 1; 0: what is not sent at once is dropped.
        keep: part of its residual with which a rank trains on, 0 <= keep <= 1; 0 as in the paper.
        codec: Q, any lossy codec that cannot be summed.

    Bytes: R-1 encoded models sent per rank and round. With the default codec that is 0.164 bits for each element, rank
        and round.
    Source: arXiv:2508.15706 (SparseLoCo), algorithm 1; arXiv:2603.08163 (Covenant-72B): H = 30, decay 0.95.
    Differs: `keep`; blocks are those of the buckets, not of each parameter. With a single rank nothing is compressed.

    Examples:
        >>> algorithm = bagua.algorithms.SparseLoCo(communication_interval=15)
        >>> model = bagua.distribute(model, optimizer, algorithm)
    """

    name: ClassVar[str] = "sparse_loco"
    summary: ClassVar[str] = "local steps; every few dozen, the largest changes in 2 bits, the others are sent later"
    exactness: ClassVar[Exactness] = Exactness.PERIODIC
    payload_kind: ClassVar[Payload] = Payload.PARAM
    lost_step: ClassVar[LostStep | None] = LostStep.REPEAT
    kept: ClassVar[tuple[str, ...]] = ("anchor", "residual")
    fed_back: ClassVar[tuple[str, ...]] = ("residual",)

    communication_interval: int = 30
    outer_lr: float = 1.0
    decay: float = 0.95
    keep: float = 0.5
    codec: str | Codec = "packed_top_k"

    def __post_init__(self) -> None:
        check_interval("communication_interval", self.communication_interval)
        check_number("outer_lr", self.outer_lr, 0.0)
        if not self.outer_lr:
            raise ValueError("outer_lr: expected a number > 0, got 0, which would never change the weights")
        check_number("decay", self.decay, 0.0, 1.0, closed=True)
        check_number("keep", self.keep, 0.0, 1.0, closed=True)
        codec = codecs.get(self.codec)
        if codec.linear or codec.lossless:
            raise ValueError(f"codec {codec.name!r} leaves next to no residual; use diloco with outer_momentum=0")

    @cached_property
    def exchange(self) -> Exchange:
        """The mean of all ranks' encoded tensors."""
        return AllGather(codecs.get(self.codec))

    def bytes_per_rank(self, n: int, size: int) -> float:
        """The exchange's, spread over the interval."""
        return self.exchange.bytes_per_rank(n, size) / self.communication_interval

    def setup(self, ctx: Context) -> None:
        """Keep the weights as the first anchor; the residual is zero."""
        ctx.prepare(self.exchange)
        for bucket in ctx.buckets:
            wide = bucket.flat.element_size() >= 4
            anchor = ctx.tensor("anchor", bucket, bucket.flat if wide else bucket.flat.float())
            ctx.tensor("residual", bucket, torch.zeros_like(anchor))

    def on_start(self, ctx: Context) -> None:
        """The weights are the first anchor."""
        for bucket in ctx.buckets:
            ctx.tensor("anchor", bucket).copy_(bucket.flat)

    def on_step_end(self, ctx: Context) -> None:
        """Exchange after every `communication_interval`-th step."""
        if (ctx.step + 1) % self.communication_interval:
            return
        for bucket in ctx.buckets:
            mean = ctx.scratch("mean", bucket).copy_(self._accumulated(ctx, bucket))
            ctx.launch(self.exchange, bucket, mean)
        ctx.commit()
        for bucket in ctx.buckets:
            unsent = self._unsent(ctx, bucket)  # of the residual and weights that are replaced now
            ctx.tensor("residual", bucket).copy_(unsent)
            ctx.tensor("anchor", bucket).add_(ctx.scratch("mean", bucket), alpha=-self.outer_lr)
            bucket.flat.copy_(self._start(ctx, bucket))

    def _start(self, ctx: Context, bucket: Bucket) -> Tensor:
        """[N]: the weights with which this rank begins a round; maybe the anchor itself."""
        anchor = ctx.tensor("anchor", bucket)
        return anchor.sub(ctx.tensor("residual", bucket), alpha=self.keep) if self.keep else anchor

    def _accumulated(self, ctx: Context, bucket: Bucket) -> Tensor:
        """[N]: decayed residual plus the change since the last round. The same bits until one of them is changed."""
        # As the weights hold it: what was rounded off in 16 bits at the start of the round was not learnt in it.
        change = self._start(ctx, bucket).to(bucket.flat.dtype).sub(bucket.flat)
        return ctx.tensor("residual", bucket).mul(self.decay).add_(change)

    def _unsent(self, ctx: Context, bucket: Bucket) -> Tensor:
        """[N]: what the codec lost of `_accumulated`. Encoded again, since a round that does not count leaves all."""
        total = self._accumulated(ctx, bucket)
        if ctx.groups.world.size == 1 or not total.numel():
            return torch.zeros_like(total)
        codec, payload = codecs.get(self.codec), total.to(bucket.flat.dtype)
        sent = codec.decode(codec.encode(payload[None]), payload.numel(), dtype=payload.dtype)[0]
        return total.sub_(sent).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

"""0/1 Adam: 1-bit momenta, exact steps at growing intervals, then local steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua.algorithms.base import Bucket, Context, Exactness, LostStep
from bagua.algorithms.qadam import MomentumAverage
from bagua.algorithms.registry import register
from bagua.codecs import Codec
from bagua.optim import TwoStage
from bagua.optim import ZeroOneAdam as ZeroOneAdamOptimizer
from bagua.optim.zero_one_adam import StepKind

__all__ = ["ZeroOneAdam"]


@register
@dataclass(frozen=True)
class ZeroOneAdam(MomentumAverage):
    """Adam whose workers average 1-bit momenta, and later only 1-bit sums of several steps.

    Needs the optimizer `bagua.optim.ZeroOneAdam`, whose options say which steps are exact, quantised or local.
    Exact and quantised steps overlap with the backward pass, as those of `QAdam`. Within an interval of local
    steps the ranks' weights differ; at its end, after the optimizer's step, they average what they moved by.

    Args:
        hierarchical: full precision within a node, quantised between nodes. None (default) does so where it has
            an effect, that is with several nodes of which one has several ranks; between sites a
            start-up benchmark decides.
        codec: the codec of momenta and sums; "sign" by default, "minmax_uint8" for 8 bits.
        error_feedback: add the compression error of one exchange to the next. None (default) does so for codecs with
            less than 8 bits per element and "top_k", which do not converge without: `eden` too, unlike with gradients.

    Bytes: about 2 (R-1)/(8 R) bytes per element for each exchange that is not exact; one exchange per interval.
    Source: arXiv:2202.06009 (0/1 Adam), algorithm 1.
    Differs: see `bagua.optim.ZeroOneAdam`.

    Examples:
        >>> optimizer = bagua.optim.ZeroOneAdam(model.parameters(), var_freeze_step=1000)
        >>> model = bagua.distribute(model, optimizer, bagua.algorithms.ZeroOneAdam(codec="int4"))
    """

    name: ClassVar[str] = "zero_one_adam"
    summary: ClassVar[str] = "Adam with momenta averaged in 1 bit, later only every few steps"
    lost_step: ClassVar[LostStep | None] = LostStep.REPEAT
    exactness: ClassVar[Exactness] = Exactness.PERIODIC
    optimizer_class: ClassVar[type[TwoStage]] = ZeroOneAdamOptimizer

    codec: str | Codec = "sign"

    def shares_gradients(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Not in local steps."""
        return all(
            group.get("local_step_clipper", 1) == 1 for optimizer in optimizers for group in optimizer.param_groups
        )

    def replicas_differ(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Within an interval of local steps."""
        return any(
            optimizer.num_steps > 0 and optimizer.kind(optimizer.num_steps) is StepKind.LOCAL
            for optimizer in optimizers
            if isinstance(optimizer, ZeroOneAdamOptimizer)
        )

    def averages_gradients(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Not in local steps."""
        return any(
            optimizer.kind(optimizer.num_steps + 1) in (StepKind.EXACT, StepKind.MOMENTUM)
            for optimizer in optimizers
            if isinstance(optimizer, ZeroOneAdamOptimizer)
        )

    def on_ready(self, ctx: Context, bucket: Bucket) -> None:
        """Nothing is exchanged in local steps."""
        if self.averages_gradients([self.optimizer(ctx)]):
            super().on_ready(ctx, bucket)

    def on_step_end(self, ctx: Context) -> None:
        """Exchange at the end of an interval; where weights are equal, look for parameters without a second moment."""
        optimizer = self.optimizer(ctx)
        assert isinstance(optimizer, ZeroOneAdamOptimizer)
        kind = optimizer.kind(optimizer.num_steps)
        if kind is StepKind.LOCAL:
            return
        late = optimizer.late([param for bucket in ctx.buckets for param in bucket.params])
        used = [float(bool(optimizer.state.get(param, {}).get("step"))) for param in late]
        if kind is StepKind.MEET:
            used = self._meet(ctx, optimizer, used)
        if num := sum(map(bool, used)):
            ctx.notice(
                f"{self.name}: {num} parameters got their first gradient after var_freeze_step, so they "
                f"have no second moment to move with; both policies begin anew after {optimizer.num_steps} steps",
                urgent=True,
            )
            optimizer.begin_anew()

    def _meet(self, ctx: Context, optimizer: ZeroOneAdamOptimizer, used: list[float]) -> list[float]:
        """Exchange; returns the sums over the ranks of `used`, which has the same length on all of them."""
        votes = torch.tensor(used, dtype=torch.float32, device=ctx.buckets[0].flat.device)
        if used:
            ctx.launch_sum(votes)
        means = [ctx.scratch("drift", bucket) for bucket in ctx.buckets]
        for bucket, flat in zip(ctx.buckets, means, strict=True):
            optimizer.mean_momenta(bucket.params, bucket.split(flat))
            if ctx.loss_scale is not None:  # as momenta are sent: the errors that are fed back are the same ones
                flat.mul_(ctx.loss_scale.to(flat.device))
            ctx.launch(self.exchange, bucket, flat)
        ctx.commit()
        for bucket, flat in zip(ctx.buckets, means, strict=True):
            if ctx.loss_scale is not None:
                flat.div_(ctx.loss_scale.to(flat.device))
            optimizer.meet(bucket.params, bucket.split(flat))
        return votes.tolist()

"""Local SGD: local steps, with periodic averages of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import nn

from bagua import codecs
from bagua.algorithms.base import Algorithm, Context, Exactness, LostStep, Payload
from bagua.algorithms.decentralized import check_interval
from bagua.algorithms.nodes import fit_hierarchy
from bagua.algorithms.registry import register
from bagua.algorithms.second_moment import check_scalable, fit_scaling, rescale_second_moments, set_up_second_moments
from bagua.codecs import Codec
from bagua.exchanges import Exchange, mix

__all__ = ["LocalSGD"]


@register
@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Every rank makes `communication_interval` local steps; then the weights are averaged.

    Post-local SGD is `Warmup(steps, "gradient_allreduce", "local_sgd")`.

    Args:
        communication_interval: steps between two averages.
        hierarchical: sum within each node first; None means False.
        codec: "identity" or a linear codec.
        scale_second_moment: correct the second moments of Adam, which come from local gradients, every 8 steps to what
            mean gradients would give. Nothing is exchanged; a copy of the second moments is kept. It helps some models
            and harms others (docs/algorithms/local_sgd.md), so it is off by default. None: with `torch.optim.Adam` and
            `AdamW` without amsgrad and weights of at least 32 bits; a notice says so.

    Bytes: 2 (R-1)/R times the weights, once per interval.
    Source: arXiv:1805.09767 (local SGD), algorithm 1; arXiv:1808.07217 (post-local SGD).

    Examples:
        >>> algorithm = bagua.algorithms.LocalSGD(communication_interval=8)
        >>> model = bagua.distribute(model, optimizer, algorithm)
    """

    name: ClassVar[str] = "local_sgd"
    summary: ClassVar[str] = "local steps; weights averaged every few steps"
    exactness: ClassVar[Exactness] = Exactness.PERIODIC
    payload_kind: ClassVar[Payload] = Payload.PARAM
    lost_step: ClassVar[LostStep | None] = LostStep.REPEAT
    kept: ClassVar[tuple[str, ...]] = ("second_moment", "adam_steps")

    communication_interval: int = 8
    hierarchical: bool | None = None
    codec: str | Codec = "identity"
    scale_second_moment: bool | None = False

    def __post_init__(self) -> None:
        check_interval("communication_interval", self.communication_interval)
        if not codecs.get(self.codec).linear:
            raise ValueError(f"codec {codecs.get(self.codec).name!r}: weights would be rounded; use a linear codec")

    @cached_property
    def exchange(self) -> Exchange:
        """The mean of all ranks."""
        return mix("complete", self.codec, hierarchical=bool(self.hierarchical))

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Resolve `hierarchical`; it has no effect on one node, or with one rank per node."""
        return fit_hierarchy(self, nodes, default=False)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """The exchange's, spread over the interval."""
        return self.exchange.bytes_per_rank(n, size) / self.communication_interval

    def check(self, params: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """An optimizer must have second moments where they are to be corrected."""
        if self.scale_second_moment:
            check_scalable(optimizers)

    def setup(self, ctx: Context) -> None:
        """Prepare the exchange; the second moments at hand are taken as they are."""
        ctx.prepare(self.exchange)
        if fit_scaling(self.scale_second_moment, ctx, self.name):
            set_up_second_moments(ctx)

    def on_step_end(self, ctx: Context) -> None:
        """Average after every `communication_interval`-th step."""
        if fit_scaling(self.scale_second_moment, ctx, self.name):
            rescale_second_moments(ctx)
        if (ctx.step + 1) % self.communication_interval:
            return
        if not ctx.repeats:
            for bucket in ctx.buckets:
                ctx.launch(self.exchange, bucket)
            ctx.wait()
            return
        means = [ctx.scratch("mean", bucket).copy_(bucket.flat) for bucket in ctx.buckets]
        for bucket, mean in zip(ctx.buckets, means, strict=True):
            ctx.launch(self.exchange, bucket, mean)
        ctx.commit()
        for bucket, mean in zip(ctx.buckets, means, strict=True):
            bucket.flat.copy_(mean)

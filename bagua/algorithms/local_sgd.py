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
from bagua.algorithms.diloco import DiLoCo
from bagua.algorithms.mean_moments import check_mean_moments
from bagua.algorithms.nodes import fit_hierarchy
from bagua.algorithms.options import check_corrections, check_keeps_changes, shown
from bagua.algorithms.registry import register
from bagua.algorithms.round_moments import (
    begin_round,
    infer_round,
    launch_round_votes,
    look_for_changes,
    record_local_step,
    set_up_rounds,
    shows_mean_steps,
)
from bagua.algorithms.second_moment import (
    check_scalable,
    fit_mean_moments,
    fit_scaling,
    rescale_second_moments,
    set_up_second_moments,
)
from bagua.codecs import Codec
from bagua.exchanges import Exchange, mix

__all__ = ["LocalSGD"]

_ROUNDS = (8, "identity")  # interval and codec
_SHORT_ROUNDS = (2, "minmax_uint8")  # the same bytes


@register
@dataclass(frozen=True)
class LocalSGD(Algorithm):
    """Every rank makes `communication_interval` local steps; then the weights are averaged.

    Post-local SGD is `Warmup(steps, "gradient_allreduce", "local_sgd")`.

    Args:
        communication_interval: steps between two averages.
        codec: "identity" or another linear codec averages the weights. With any other, as "minmax_uint8" or "int4", the
            change of the weights since the last average is encoded: a round is the one of `DiLoCo` with a plain outer
            step, and needs a copy of the weights.
            If neither option is given there is an average of changes in 8 bits every 2 steps. That is as many bytes as
            32 bits every 8 steps, and the loss is much lower (docs/algorithms/local_sgd.md). If only one is given the
            other is 8 or "identity".
        hierarchical: sum within each node first. None (default) does so where nodes have several ranks and the codec
            is not linear: their ranks would share the node's link; and where there are sites (BAGUA_SITE).
        mean_moments: after a round set both moments of Adam to those of the mean gradients, which the average of the
            weights shows. One number for each parameter is exchanged; two tensors of the size of the weights that Adam
            trains are kept. None (default): in rounds of up to 4 steps and at least 3 bits, for `torch.optim.Adam` and
            `AdamW` without amsgrad and weights of at least 32 bits, unless `scale_second_moment` is true; a notice says
            so. Other optimizers beside them, such as Muon, keep their state as it is.
        scale_second_moment: correct the second moments of Adam, which come from local gradients, every 8 steps to what
            mean gradients would give. Nothing is exchanged; a copy of the second moments is kept. It helps some models
            and harms others (docs/algorithms/local_sgd.md), so it is off by default. None: with the same optimizers and
            weights, unless `mean_moments` sets them; a notice says so.

    Bytes: 2 (R-1)/R times the encoded weights, once per interval.
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
    kept: ClassVar[tuple[str, ...]] = ("anchor", "second_moment", "adam_steps")

    communication_interval: int | None = None
    hierarchical: bool | None = None
    codec: str | Codec | None = None
    scale_second_moment: bool | None = False
    mean_moments: bool | None = None

    def __repr__(self) -> str:
        """As of any dataclass, but without `mean_moments` if it is open."""
        return shown(self, ("mean_moments",))

    def __post_init__(self) -> None:
        given = self.communication_interval is not None or self.codec is not None
        rounds = _ROUNDS if given else _SHORT_ROUNDS
        for name, value in zip(("communication_interval", "codec"), rounds, strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        check_interval("communication_interval", self.interval)
        check_keeps_changes(self._codec)
        check_corrections(self.mean_moments, self.scale_second_moment)
        _ = self.exchange  # refuse what does not mix now, not in the middle of a run

    @property
    def interval(self) -> int:
        """Steps between two averages."""
        assert self.communication_interval is not None
        return self.communication_interval

    @property
    def _codec(self) -> Codec:
        assert self.codec is not None
        return codecs.get(self.codec)

    @cached_property
    def _changes(self) -> DiLoCo | None:
        """Averages the changes of the weights; None: the weights are averaged themselves."""
        if self._codec.linear:
            return None
        names = ("hierarchical", "scale_second_moment", "mean_moments")
        options = {name: getattr(self, name) for name in names}
        return DiLoCo(self.interval, 1.0, 0.0, False, self._codec, **options)

    @cached_property
    def exchange(self) -> Exchange:
        """The mean of all ranks."""
        return mix("complete", self._codec, hierarchical=bool(self.hierarchical))

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Resolve `hierarchical`; it has no effect on one node, or with one rank per node."""
        return fit_hierarchy(self, nodes, default=not self._codec.linear)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """The exchange's, spread over the interval."""
        return self.exchange.bytes_per_rank(n, size) / self.interval

    def check(self, params: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """An optimizer must have moments where they are to be corrected."""
        if self.mean_moments:
            check_mean_moments(params, optimizers, others=True)
        if self.scale_second_moment:
            check_scalable(optimizers)

    @property
    def keeps_weights(self) -> bool:
        """The anchor, if changes are averaged."""
        return self._changes is not None

    def setup(self, ctx: Context) -> None:
        """Prepare the exchange; the second moments at hand are taken as they are."""
        _ = self._means(ctx), self._scales(ctx)  # first: they are resolved once, with this name in notices
        if self._changes is not None:
            self._changes.setup(ctx)
            return
        ctx.prepare(self.exchange)
        self.on_start(ctx)

    def on_start(self, ctx: Context) -> None:
        """Weights and moments at hand are those of the first round."""
        if self._changes is not None:
            self._changes.on_start(ctx)
            return
        if self._means(ctx):
            set_up_rounds(ctx, self.interval, self._codec)
        if self._scales(ctx):
            set_up_second_moments(ctx)

    def on_step_begin(self, ctx: Context) -> None:
        """Moments are inferred from the optimizers' steps alone."""
        if self._means(ctx):
            look_for_changes(ctx)

    def on_step_end(self, ctx: Context) -> None:
        """Average after every `interval`-th step."""
        if self._changes is not None:
            self._changes.on_step_end(ctx)
            return
        infers = self._means(ctx)
        if infers:
            record_local_step(ctx, self.interval)
        if self._scales(ctx):
            rescale_second_moments(ctx)
        if (ctx.step + 1) % self.interval:
            return
        if not ctx.repeats and not infers:
            for bucket in ctx.buckets:
                ctx.launch(self.exchange, bucket)
            ctx.wait()
            return
        means = [ctx.scratch("mean", bucket).copy_(bucket.flat) for bucket in ctx.buckets]
        for bucket, mean in zip(ctx.buckets, means, strict=True):
            ctx.launch(self.exchange, bucket, mean)
        if infers:
            launch_round_votes(ctx, self.interval)
        ctx.commit()
        for bucket, mean in zip(ctx.buckets, means, strict=True):
            if infers:
                infer_round(ctx, bucket, self.interval, mean)
            bucket.flat.copy_(mean)
            if infers:
                begin_round(ctx, bucket, self.interval)

    def _means(self, ctx: Context) -> bool:
        fits = shows_mean_steps(self.interval, self._codec)
        left_open = self.mean_moments is None and not self.scale_second_moment and fits
        return fit_mean_moments(None if left_open else bool(self.mean_moments), ctx, self.name, others=True)

    def _scales(self, ctx: Context) -> bool:
        return fit_scaling(False if self._means(ctx) else self.scale_second_moment, ctx, self.name)

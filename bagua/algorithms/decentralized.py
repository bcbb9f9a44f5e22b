"""Decentralized SGD: average weights with peers, step with local gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import nn

from bagua import codecs, topologies
from bagua.algorithms.base import Algorithm, Context, Exactness, LostStep, Payload, Ticket
from bagua.algorithms.gradient_samples import (
    OPTION,
    GradientSamples,
    check_gradient_interval,
    fit_gradient_interval,
)
from bagua.algorithms.mean_moments import (
    check_mean_moments,
    forget_steps,
    infer_moments,
    launch_step_votes,
    record_steps,
    set_up_mean_moments,
)
from bagua.algorithms.nodes import fit_hierarchy
from bagua.algorithms.options import check_corrections, shown
from bagua.algorithms.registry import register
from bagua.algorithms.second_moment import (
    check_scalable,
    fit_mean_moments,
    fit_scaling,
    rescale_second_moments,
    set_up_second_moments,
)
from bagua.codecs import Codec
from bagua.exchanges import Exchange, mix
from bagua.topologies import Topology

__all__ = ["Decentralized"]

_MODES = {"all": "complete", "shift_one": "shift_one"}


@register
@dataclass(frozen=True)
class Decentralized(Algorithm):
    """Decentralized SGD: x_i <- (W x)_i - lr * g(x_i). Weights are averaged while the gradient is computed.

    The exchange overlaps with forward and backward pass; its result replaces the weights just before the optimizer's
    step. Averaged are the weights at the start of the step's first forward pass. A change of weights from there to the
    optimizer's step, in place or by hand, is overwritten. Ranks hold different weights; average them (or switch to
    gradient_allreduce) before you save a final model. Stable up to half of the largest learning rate of DDP, on a ring
    of 4 ranks and more up to a third.

    Args:
        hierarchical: exact average within a node, peers are nodes. None (default) does so where there are
            several nodes of which one has several ranks. Nodes of unequal size count alike, unless the topology is
            complete, so the mean over ranks is not kept: pass False there, or start as many ranks on every node.
        peer_selection_mode: "all" or "shift_one", Bagua 0.9's names for the topologies "complete" and
            "shift_one". Any number of ranks: `bagua.topologies.ShiftOne` says who rests when it is odd.
        communication_interval: steps between two averages.
        topology: any topology, instead of `peer_selection_mode`.
        codec: "identity", or a linear codec ("bf16", "fp16") for the exchanged weights; a lossy one with a
            fixed sparse topology exchanges differences.
        mean_moments: set the moments of `torch.optim.Adam` or `AdamW` to those of the mean gradient, which the average
            of the weights shows (docs/algorithms/decentralized.md has the formula). One number for each parameter is
            exchanged; two more copies of the weights. Only with the topology "complete", the codec "identity" and an
            average in each step. None (default): there, with `torch.optim.Adam` and `AdamW` without amsgrad and weights
            of at least 32 bits, unless `scale_second_moment` is true; a notice says so.
        scale_second_moment: correct the second moments of Adam, which come from local gradients, every 8 steps to what
            mean gradients would give. Nothing is exchanged; a copy of the second moments is kept. It helps some models
            and harms others (docs/algorithms/local_sgd.md), so it is off by default. None: with the same optimizers and
            weights, unless `mean_moments` sets them; a notice says so.
        gradient_interval: correct the second moments of Adam by how much of the gradients is noise of small batches.
            It is measured: every so many steps the gradients are averaged, each bucket in a step of its own, in 4 bits
            and beside the next step. 0: not. None: 8 with the same optimizers and weights where `mean_moments` cannot
            be used, unless `scale_second_moment` is given; a notice says so. A number takes the place of `mean_moments`
            where that is left open.

    Bytes: the weights once per peer and interval; 2 (R-1)/R times the weights for "all". And the gradients in 4 bits
        per `gradient_interval`.
    Source: arXiv:1705.09056 (D-PSGD), algorithm 1; Bagua 0.9's decentralized SGD.

    Examples:
        >>> algorithm = bagua.algorithms.Decentralized(topology="exponential")
        >>> model = bagua.distribute(model, optimizer, algorithm)
    """

    name: ClassVar[str] = "decentralized"
    summary: ClassVar[str] = "local gradients; weights averaged with peers during the step"
    exactness: ClassVar[Exactness] = Exactness.DECENTRALIZED
    payload_kind: ClassVar[Payload] = Payload.PARAM
    lost_step: ClassVar[LostStep | None] = LostStep.KEEP
    kept: ClassVar[tuple[str, ...]] = ("squares",)

    hierarchical: bool | None = None
    peer_selection_mode: str = "all"
    communication_interval: int = 1
    topology: str | Topology | None = None
    codec: str | Codec = "identity"
    mean_moments: bool | None = None
    scale_second_moment: bool | None = False
    gradient_interval: int | None = None

    def __repr__(self) -> str:
        """As of any dataclass, but without `gradient_interval` if it is open."""
        return shown(self, ("gradient_interval",))

    def __post_init__(self) -> None:
        check_gradient_interval(self.gradient_interval, self.scale_second_moment)
        if self.gradient_interval and self.mean_moments:
            raise ValueError(f"{OPTION} and mean_moments contradict: an average of all shows the moments")
        if self.peer_selection_mode not in _MODES:
            raise ValueError(
                f"peer_selection_mode: expected one of {', '.join(_MODES)}, got {self.peer_selection_mode!r}"
            )
        if self.topology is not None and self.peer_selection_mode != "all":
            raise ValueError(
                f"topology={self.topology!r} and peer_selection_mode={self.peer_selection_mode!r} contradict"
            )
        check_interval("communication_interval", self.communication_interval)
        chosen, codec = topologies.get(self.topology or "complete"), codecs.get(self.codec)
        if chosen.complete and not codec.linear:
            raise ValueError(
                f"codec {codec.name!r} cannot be combined with topology {chosen.name!r}: weights would be rounded; "
                "use topology='ring', which sends differences of weights, or 'local_sgd' with this codec"
            )
        check_corrections(self.mean_moments, self.scale_second_moment)
        if self.mean_moments and not self._shows_mean_steps:
            raise ValueError(
                "mean_moments: needs topology 'complete', codec 'identity' and communication_interval=1, "
                "where an average shows the mean step, "
                f"got {self._topology!r}, {codec.name!r} and {self.communication_interval}"
            )
        _ = self.exchange

    @property
    def _topology(self) -> str | Topology:
        return self.topology if self.topology is not None else _MODES[self.peer_selection_mode]

    @cached_property
    def _shows_mean_steps(self) -> bool:
        complete, lossless = topologies.get(self._topology).complete, codecs.get(self.codec).lossless
        return complete and lossless and self.communication_interval == 1

    @cached_property
    def exchange(self) -> Exchange:
        """Gossip or an average of all."""
        return mix(self._topology, self.codec, hierarchical=bool(self.hierarchical))

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Hierarchical by default where there is a hierarchy."""
        return fit_hierarchy(self, nodes, default=True)

    def for_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> Algorithm:
        """Resolve `gradient_interval`."""
        if self._shows_mean_steps or self.scale_second_moment is not False:
            return self
        return replace(self, gradient_interval=fit_gradient_interval(self.gradient_interval, optimizers))

    def bytes_per_rank(self, n: int, size: int) -> float:
        """Those of the exchanges, spread over the intervals."""
        own = self.exchange.bytes_per_rank(n, size) / self.communication_interval
        return own + self._samples.bytes_per_rank(n, size)

    @property
    def _samples(self) -> GradientSamples:
        return GradientSamples(self.name, self.gradient_interval, bool(self.hierarchical))

    def check(self, params: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """An optimizer must have the moments that are to be set."""
        self._samples.check(params, optimizers)
        if self.mean_moments:
            check_mean_moments(params, optimizers)
        if self.scale_second_moment:
            check_scalable(optimizers)

    @property
    def keeps_weights(self) -> bool:
        """Replicas, if differences are sent."""
        return self.exchange.two_phases

    def setup(self, ctx: Context) -> None:
        """Prepare the exchange; the moments at hand are taken as they are."""
        ctx.prepare(self.exchange)
        self.on_start(ctx)
        self._samples.set_up(ctx)

    def on_start(self, ctx: Context) -> None:
        """The moments at hand are taken as they are."""
        if self._means(ctx):
            set_up_mean_moments(ctx)
        if self._scales(ctx):
            set_up_second_moments(ctx)

    def on_forward(self, ctx: Context) -> None:
        """Average a copy of the weights as they are now, from now until the end of the backward pass."""
        if ctx.step % self.communication_interval:
            return
        for bucket in ctx.buckets:
            # Not on the lane, which may come to it late: the pass itself may change weights (nn.Embedding with
            # max_norm), and so may what comes between the passes of a step (SAM).
            mixed = ctx.scratch("mixed", bucket).copy_(bucket.flat)
            step = ctx.step // self.communication_interval
            _pending(ctx).append(ctx.launch(self.exchange, bucket, mixed, step=step))
        if self._means(ctx):
            launch_step_votes(ctx)

    def on_backward_end(self, ctx: Context) -> None:
        """An exchange that fails is to fail here: once an optimizer's step has begun, it counts."""
        if _pending(ctx):
            ctx.wait()

    def on_step_begin(self, ctx: Context) -> None:
        """Apply the average, now that no backward pass needs the old weights."""
        self._samples.begin(ctx)
        pending = _pending(ctx)
        if pending:
            ctx.wait()
            for bucket in ctx.buckets:
                mixed = ctx.scratch("mixed", bucket)
                if self._means(ctx):
                    infer_moments(ctx, bucket, mixed)
                bucket.flat.copy_(mixed)
            pending.clear()

    def on_step_end(self, ctx: Context) -> None:
        """Keep what the next average needs to infer the moments, or estimate them."""
        if self._means(ctx):
            record_steps(ctx)
        if self._scales(ctx):
            rescale_second_moments(ctx)
        self._samples.take(ctx)
        self._samples.correct(ctx)
        self._samples.launch(ctx)

    def on_pause(self, ctx: Context) -> None:
        """Complete the exchange in flight."""
        self._samples.take(ctx)
        self.on_step_begin(ctx)
        if self._means(ctx):
            forget_steps(ctx)

    def saving(self, ctx: Context) -> AbstractContextManager[object]:
        """Means of gradients in flight are taken over first."""
        self._samples.take(ctx)
        return super().saving(ctx)

    def on_load(self, ctx: Context) -> None:
        """Drop the exchange in flight: it belongs to other weights."""
        self._samples.drop(ctx)
        _pending(ctx).clear()

    def _means(self, ctx: Context) -> bool:
        asked = bool(self.scale_second_moment or self.gradient_interval)  # for another correction
        left_open = self.mean_moments is None and not asked and self._shows_mean_steps
        return fit_mean_moments(None if left_open else bool(self.mean_moments), ctx, self.name)

    def _scales(self, ctx: Context) -> bool:
        return fit_scaling(False if self._means(ctx) else self.scale_second_moment, ctx, self.name)


def _pending(ctx: Context) -> list[Ticket]:
    """The launches of this step that have not been applied."""
    return ctx.keep("pending", list)


def check_interval(name: str, value: object) -> None:
    """Check that an option is a positive number of steps.

    Raises:
        ValueError: names the option.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a number of steps >= 1, got {value!r}")

"""Decentralized SGD on a ring with quantised differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import nn

from bagua import codecs, topologies
from bagua.algorithms.base import Algorithm, Bucket, Context, Exactness, LostStep, Payload
from bagua.algorithms.decentralized import check_interval
from bagua.algorithms.gradient_samples import GradientSamples, check_gradient_interval, fit_gradient_interval
from bagua.algorithms.nodes import fit_hierarchy
from bagua.algorithms.options import shown
from bagua.algorithms.registry import register
from bagua.algorithms.second_moment import check_scalable, fit_scaling, rescale_second_moments, set_up_second_moments
from bagua.codecs import Codec
from bagua.exchanges import DifferenceGossip, Exchange, Hierarchical
from bagua.topologies import Topology

__all__ = ["LowPrecisionDecentralized"]


@register
@dataclass(frozen=True)
class LowPrecisionDecentralized(Algorithm):
    """After each optimizer step, gossip with both neighbours on a ring in 8 bits.

    Every rank keeps a replica of itself and of each neighbour and sends only the quantised difference between
    where it wants to be and its own replica (`bagua.exchanges.DifferenceGossip`), so quantisation errors do not
    add up. The new weights follow from the replicas of the step before, so only encoding is waited for: what is sent
    changes the replicas, beside the next step. With one neighbour (two ranks) that one has weight 1/2.

    Args:
        hierarchical: exact average within a node, the ring joins nodes. None (default) does so where there are
            several nodes of which one has several ranks. Nodes of unequal size count alike, so the mean over ranks is
            not kept: pass False there, or start as many ranks on every node.
        communication_interval: gossip after the first step and every so many steps from there. On a ring of 4 ranks and
            more, the larger it is the smaller is the largest stable learning rate (the page of the algorithm has it).
        codec: any lossy, non-linear codec.
        topology: any topology with fixed peers.
        overlap: encode during the next forward and backward pass, too. The exchange launched at the end of step t is
            applied as a difference at the end of step t + 1:

                s = x_t;  me += Q((s - me) + sum_j w_j (y_j - me));  x_{t+1} = x_t - lr g(x_t) + (me - s)

            Without loss x_{t+1} + lr g(x_t) = me, hence me_{t+1} = W me_t - lr g(x_t): the recursion without
            overlap, with a gradient taken at weights that lack the last mixing, as `decentralized` takes it
            throughout. So the steps' mean is that of plain SGD and only the distance among the ranks grows, by
            one step's drift. Two more copies of the weights.
        scale_second_moment: correct the second moments of Adam, which come from local gradients, every 8 steps to what
            mean gradients would give. Nothing is exchanged; a copy of the second moments is kept. It helps some models
            and harms others (docs/algorithms/local_sgd.md), so it is off by default. None: with `torch.optim.Adam` and
            `AdamW` without amsgrad and weights of at least 32 bits; a notice says so.
        gradient_interval: correct the second moments of Adam by how much of the gradients is noise of small batches.
            It is measured: every so many steps the gradients are averaged, each bucket in a step of its own, in 4 bits
            and beside the next step. 0: not. None: 8 with `torch.optim.Adam` and `AdamW` without amsgrad and weights
            of at least 32 bits, unless `scale_second_moment` is given; a notice says so.

    Bytes: the encoded weights once per neighbour and interval, and the gradients in 4 bits per `gradient_interval`.
    Source: Bagua 0.9's low-precision decentralized SGD; arXiv:1803.06443 (DCD-PSGD), algorithm 1;
        the overlap follows D-PSGD, arXiv:1705.09056, algorithm 1, where gradient and average are computed at once.

    Examples:
        >>> algorithm = bagua.algorithms.LowPrecisionDecentralized(overlap=True)
        >>> model = bagua.distribute(model, optimizer, algorithm)
    """

    name: ClassVar[str] = "low_precision_decentralized"
    summary: ClassVar[str] = "local gradients; 8-bit weight differences exchanged with both ring neighbours"
    exactness: ClassVar[Exactness] = Exactness.DECENTRALIZED
    payload_kind: ClassVar[Payload] = Payload.PARAM
    lost_step: ClassVar[LostStep | None] = LostStep.KEEP
    kept: ClassVar[tuple[str, ...]] = ("squares",)

    hierarchical: bool | None = None
    communication_interval: int = 1
    codec: str | Codec = "minmax_uint8"
    topology: str | Topology = "ring"
    overlap: bool = False
    scale_second_moment: bool | None = False
    gradient_interval: int | None = None

    def __repr__(self) -> str:
        """As of any dataclass, but without `gradient_interval` if it is open."""
        return shown(self, ("gradient_interval",))

    def __post_init__(self) -> None:
        check_gradient_interval(self.gradient_interval, self.scale_second_moment)
        check_interval("communication_interval", self.communication_interval)
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap: expected True or False, got {self.overlap!r}")
        _ = self.exchange

    @cached_property
    def exchange(self) -> Exchange:
        """Gossip of differences, maybe among leaders only."""
        gossip = DifferenceGossip(topologies.get(self.topology), codecs.get(self.codec))
        return Hierarchical(gossip) if self.hierarchical else gossip

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Hierarchical by default where there is a hierarchy."""
        return fit_hierarchy(self, nodes, default=True)

    def for_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> Algorithm:
        """Resolve `gradient_interval`."""
        if self.scale_second_moment is not False:
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
        """An optimizer must have second moments where they are to be corrected."""
        self._samples.check(params, optimizers)
        if self.scale_second_moment:
            check_scalable(optimizers)

    def setup(self, ctx: Context) -> None:
        """Create the state that one step passes to the next, so that checkpoints contain it."""
        super().setup(ctx)
        if fit_scaling(self.scale_second_moment, ctx, self.name):
            set_up_second_moments(ctx)
        self._samples.set_up(ctx)
        if self.overlap:
            for bucket in ctx.buckets:
                ctx.tensor("snapshot", bucket)
                ctx.tensor("mixed", bucket)
                ctx.tensor("pending", bucket, torch.zeros(1, dtype=torch.int64, device="cpu"))

    def on_start(self, ctx: Context) -> None:
        """The moments at hand are taken as they are."""
        if fit_scaling(self.scale_second_moment, ctx, self.name):
            set_up_second_moments(ctx)

    def on_step_begin(self, ctx: Context) -> None:
        """The optimizers' state may have been loaded."""
        self._samples.begin(ctx)

    def on_step_end(self, ctx: Context) -> None:
        """Gossip. The next forward pass needs the weights, which are known once this rank's difference is encoded. What
        the peers send is needed at the end of the next step, as is the result with overlap.
        """
        if fit_scaling(self.scale_second_moment, ctx, self.name):
            rescale_second_moments(ctx)
        self._finish(ctx)
        self._samples.correct(ctx)
        self._exchange(ctx)
        self._samples.launch(ctx)

    def _exchange(self, ctx: Context) -> None:
        if ctx.step % self.communication_interval:
            return
        if not self.overlap:
            ctx.launch_early(self.exchange, ctx.buckets)
            return
        for bucket in ctx.buckets:
            self._begin(ctx, bucket)

    def on_pause(self, ctx: Context) -> None:
        """Complete the exchange in flight."""
        self._finish(ctx)

    def saving(self, ctx: Context) -> AbstractContextManager[object]:
        """Means of gradients in flight are taken over first."""
        self._samples.take(ctx)
        return super().saving(ctx)

    def on_load(self, ctx: Context) -> None:
        """Drop the exchange in flight: it belongs to other weights."""
        self._samples.drop(ctx)
        if self.overlap:
            for bucket in ctx.buckets:
                ctx.tensor("pending", bucket).zero_()

    def _begin(self, ctx: Context, bucket: Bucket) -> None:
        snapshot, mixed = ctx.tensor("snapshot", bucket), ctx.tensor("mixed", bucket)
        snapshot.copy_(bucket.flat)
        ctx.launch(self.exchange, bucket, mixed, before=lambda: mixed.copy_(snapshot))
        ctx.tensor("pending", bucket).fill_(1)

    def _finish(self, ctx: Context) -> None:
        """Take over the means of gradients in flight. Add the change made by an exchange in flight; the optimizer's
        step made meanwhile is kept.
        """
        self._samples.take(ctx)
        ctx.wait()
        pending = [bucket for bucket in ctx.buckets if self.overlap and int(ctx.tensor("pending", bucket))]
        for bucket in pending:
            bucket.flat.add_(ctx.tensor("mixed", bucket).sub_(ctx.tensor("snapshot", bucket)))
            ctx.tensor("pending", bucket).zero_()

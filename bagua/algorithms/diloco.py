"""DiLoCo: local training, with an outer optimizer that steps on the averaged pseudo-gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bagua import codecs
from bagua.algorithms.base import Algorithm, Bucket, Context, Exactness, LostStep, Payload
from bagua.algorithms.decentralized import check_interval
from bagua.algorithms.idle_rows import clear_idle_rows, launch_used_rows, loses_zeros, note_used_rows
from bagua.algorithms.mean_moments import adam_slots_of, check_mean_moments
from bagua.algorithms.nodes import fit_hierarchy, num_encoding
from bagua.algorithms.options import check_corrections, check_keeps_changes, check_number, shown
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

__all__ = ["DiLoCo"]


class _Rounds(NamedTuple):
    """Interval, codec and outer optimizer."""

    interval: int
    codec: str
    lr: float
    momentum: float


_ROUNDS = _Rounds(8, "int4", 0.7, 0.5)
_SHORT_ROUNDS = _Rounds(3, "eden:bits=3", 1.0, 0.0)  # twice the bytes, and a much lower loss


@register
@dataclass(frozen=True)
class DiLoCo(Algorithm):
    """Every H local steps, an outer optimizer steps on the pseudo-gradient d = mean(anchor - x); then x = anchor.

    The optimizers given to `distribute` are the inner ones and step with local gradients. The outer one is SGD
    with momentum: v = mu v + d; anchor -= lr (d + mu v), or lr v without Nesterov. The anchor is the same, bit
    for bit, on all ranks. It starts as the weights at hand, which must be equal: after `distribute`, or after a
    synchronous algorithm in `Warmup(steps, "gradient_allreduce", "diloco")`.

    All ranks must make the same number of optimizer steps; a GradScaler that skips a step on one rank only breaks
    that. A round in flight at the end of training, or at a switch of the algorithm, is dropped;
    `bagua.average_parameters` makes the weights of all ranks equal.

    Args:
        communication_interval: H, inner steps between two outer steps; the papers use 100 to 500.
        outer_lr, outer_momentum: the outer optimizer. The paper's momentum is 0.9, for hundreds of rounds.
        nesterov: Nesterov momentum; None (default): where there is momentum.
        codec: encoding of d: "int4", "eden:bits=3", "minmax_uint8", "bf16", "identity", or any codec.
            If none of these five options nor `fragments`, `delay` or `mixing` is given there is a round of 3 bits every
            3 steps whose outer step takes the average of the weights (rate 1, no momentum). Runs of some 500 steps
            learn much better by that (docs/algorithms/local_sgd.md).
            If one is given, the others are 8 steps, a rate of 0.7, a momentum of 0.5 and "int4": half the bytes. In
            runs of 5 to 80 rounds 0.5 was better than 0.9 with SGD, Adam and Muon.
        error_feedback: add the compression error of one round to the next (lossy, non-linear codecs). "top_k" and
            "packed_top_k" need it.
        fragments: bucket i belongs to fragment i mod `fragments`, and fragment f takes its outer step
            H/fragments steps after fragment f - 1, so that the network is used evenly. Must divide H.
        delay: inner steps between computing d and the outer step (at most H/fragments).
            The exchange overlaps with these steps.
        mixing: a in x = (1 - a) anchor + a x, the share kept of the inner steps made during the delay. None is 0
            without a delay and 0.5 with one, as in the paper.
        hierarchical: sum within each node first. None (default) does so where nodes have several ranks and the codec
            cannot be summed, as "int4": their ranks would share the node's link; and between sites (BAGUA_SITE).
        mean_moments: after a round set both moments of Adam to those of the mean gradients, which the average of the
            weights shows. One number for each parameter is exchanged; two tensors of the size of the weights that Adam
            trains are kept. Needs a plain outer step (rate 1, no momentum), one fragment, no delay and no mixing. None
            (default): with these, rounds of up to 4 steps and at least 3 bits, for `torch.optim.Adam` and `AdamW`
            without amsgrad and weights of at least 32 bits, unless `scale_second_moment` is true; a notice says so.
            Other optimizers beside them, such as Muon, keep their state as it is.
        scale_second_moment: correct the second moments of Adam, which come from local gradients, every 8 steps to what
            mean gradients would give. Nothing is exchanged; a copy of the second moments is kept. It helps some models
            and harms others (docs/algorithms/local_sgd.md), so it is off by default. None: with the same optimizers and
            weights, unless `mean_moments` sets them; a notice says so.

    Bytes: those of the exchange, once per H steps; peaks are 1/fragments of a round.
    Source: arXiv:2311.08105 (DiLoCo), algorithm 1; arXiv:2501.18512 (Streaming DiLoCo), algorithm 2: fragments,
        delay, mixing; with `delay` = H and `mixing` = 0 the delayed variant of arXiv:2502.12996.
    Differs: the default of `outer_momentum`. Fragments are made of buckets, not of layers. Anchor and momentum are kept
        in fp32 for weights of 16 bits.

    Examples:
        >>> algorithm = bagua.algorithms.DiLoCo(communication_interval=100)
        >>> model = bagua.distribute(model, optimizer, algorithm)
    """

    name: ClassVar[str] = "diloco"
    summary: ClassVar[str] = "local steps; every few, an outer step on the averaged pseudo-gradient"
    exactness: ClassVar[Exactness] = Exactness.PERIODIC
    payload_kind: ClassVar[Payload] = Payload.PARAM
    lost_step: ClassVar[LostStep | None] = LostStep.REPEAT
    kept: ClassVar[tuple[str, ...]] = ("anchor", "momentum", "launched_at", "second_moment", "adam_steps")

    communication_interval: int | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    nesterov: bool | None = None
    codec: str | Codec | None = None
    error_feedback: bool = False
    fragments: int = 1
    delay: int = 0
    mixing: float | None = None
    hierarchical: bool | None = None
    scale_second_moment: bool | None = False
    mean_moments: bool | None = None

    def __repr__(self) -> str:
        """As of any dataclass, but without `mean_moments` if it is open."""
        return shown(self, ("mean_moments",))

    def __post_init__(self) -> None:
        rounds = _ROUNDS if self._given else _SHORT_ROUNDS
        for name, value in zip(("communication_interval", "codec", "outer_lr", "outer_momentum"), rounds, strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.nesterov is None:
            object.__setattr__(self, "nesterov", bool(self.outer_momentum))
        check_interval("communication_interval", self.interval)
        check_interval("fragments", self.fragments)
        if self.interval % self.fragments:
            raise ValueError(f"fragments: {self.fragments} does not divide communication_interval={self.interval}")
        if isinstance(self.delay, bool) or not isinstance(self.delay, int) or not 0 <= self.delay <= self._spacing:
            raise ValueError(
                f"delay: expected 0 to communication_interval / fragments = {self._spacing} steps, got {self.delay!r}"
            )
        lr, momentum, nesterov = self._outer
        check_number("outer_lr", lr, 0.0)
        if not lr:
            raise ValueError("outer_lr: expected a number > 0, got 0, which would never change the weights")
        check_number("outer_momentum", momentum, 0.0, 1.0)
        if self.mixing is not None:
            check_number("mixing", self.mixing, 0.0, 1.0)
        if nesterov and not momentum:
            raise ValueError("nesterov: True needs outer_momentum > 0; pass nesterov=False for plain outer SGD")
        if not self.error_feedback:
            check_keeps_changes(self._codec, coarse=True)
        check_corrections(self.mean_moments, self.scale_second_moment)
        if self.mean_moments and not self._averages:
            raise ValueError(
                "mean_moments: needs rounds that end with the average of the weights: outer_lr=1, outer_momentum=0, "
                "fragments=1, delay=0 and no mixing"
            )
        _ = self.exchange

    @property
    def _given(self) -> bool:
        """Whether an option was given that keeps the defaults from being short rounds."""
        options = (self.communication_interval, self.codec, self.outer_lr, self.outer_momentum, self.nesterov)
        return options != (None,) * len(options) or self.fragments != 1 or self.delay != 0 or self.mixing is not None

    @property
    def _averages(self) -> bool:
        """Whether a round ends with the average of the weights, but for what the codec loses."""
        return self._outer[:2] == (1.0, 0.0) and self.fragments == 1 and not self.delay and not self.mixing

    @property
    def interval(self) -> int:
        """Inner steps between two outer steps."""
        assert self.communication_interval is not None
        return self.communication_interval

    @property
    def _outer(self) -> tuple[float, float, bool]:
        """Learning rate and momentum of the outer optimizer, and whether the momentum is Nesterov's."""
        assert self.outer_lr is not None and self.outer_momentum is not None
        return self.outer_lr, self.outer_momentum, bool(self.nesterov)

    @property
    def _codec(self) -> Codec:
        assert self.codec is not None
        return codecs.get(self.codec)

    @cached_property
    def exchange(self) -> Exchange:
        """The mean of all ranks."""
        return mix("complete", self._codec, hierarchical=bool(self.hierarchical), error_feedback=self.error_feedback)

    @property
    def _spacing(self) -> int:
        """Steps between the rounds of two consecutive fragments."""
        return self.interval // self.fragments

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

    def setup(self, ctx: Context) -> None:
        """Keep the weights as the first anchor.

        Raises:
            ValueError: there are fewer buckets than fragments.
        """
        if len(ctx.buckets) < self.fragments:
            raise ValueError(
                f"fragments={self.fragments}, but the parameters fill {len(ctx.buckets)} bucket(s) only; "
                "lower bucket_bytes or fragments"
            )
        ctx.prepare(self.exchange)
        self._set_up_moments(ctx)
        for bucket in ctx.buckets:
            wide = bucket.flat.element_size() >= 4
            anchor = ctx.tensor("anchor", bucket, bucket.flat if wide else bucket.flat.float())
            if self._outer[1]:
                ctx.tensor("momentum", bucket, anchor).zero_()
            if self.delay:
                ctx.tensor("delta", bucket)
                ctx.tensor("launched_at", bucket, torch.zeros(1, dtype=torch.int64, device="cpu"))

    def on_start(self, ctx: Context) -> None:
        """The weights are the first anchor."""
        self._set_up_moments(ctx)
        for bucket in ctx.buckets:
            ctx.tensor("anchor", bucket).copy_(bucket.flat)

    def _set_up_moments(self, ctx: Context) -> None:
        if self._means(ctx):
            set_up_rounds(ctx, self.interval, self._codec)
        if self._scales(ctx):
            set_up_second_moments(ctx)

    def on_step_begin(self, ctx: Context) -> None:
        """Moments are inferred from the optimizers' steps alone."""
        if self._means(ctx):
            look_for_changes(ctx)

    def on_step_end(self, ctx: Context) -> None:
        """Finish the round that is due, then begin the one that is due; at once without a delay."""
        if self._means(ctx):
            record_local_step(ctx, self.interval)
        if self._scales(ctx):
            rescale_second_moments(ctx)
        step = ctx.step + 1
        if self.delay:
            begun = step - self.delay
            late = [each for each in self._due(ctx, begun) if int(ctx.tensor("launched_at", each)) == begun]
            if late:
                for bucket in late:
                    if bucket.index in self._interrupted(ctx):
                        self._launch(ctx, bucket)
                ctx.commit()  # these only: a delay is never longer than the space between two rounds
                self._outer_step(ctx, late)
                for bucket in late:
                    ctx.tensor("launched_at", bucket).fill_(-1)  # not again if this call is repeated
        due = self._due(ctx, step)
        for bucket in due:
            self._launch(ctx, bucket)
            if self.delay:
                ctx.tensor("launched_at", bucket).fill_(step)
        if due and not self.delay:
            if self._means(ctx):
                launch_round_votes(ctx, self.interval)
            clears = self._clears_idle_rows(ctx)
            if clears:
                launch_used_rows(ctx, due)
            ctx.commit()
            if clears:
                # Weights of which nobody has moments only decay, by as much on all ranks.
                deltas = [self._delta(ctx, bucket) for bucket in due]
                clear_idle_rows(ctx, due, deltas, partial(self._own_change, ctx))
            self._outer_step(ctx, due)

    def _means(self, ctx: Context) -> bool:
        fits = self._averages and shows_mean_steps(self.interval, self._codec)
        left_open = self.mean_moments is None and not self.scale_second_moment and fits
        return fit_mean_moments(None if left_open else bool(self.mean_moments), ctx, self.name, others=True)

    def _scales(self, ctx: Context) -> bool:
        return fit_scaling(False if self._means(ctx) else self.scale_second_moment, ctx, self.name)

    def _clears_idle_rows(self, ctx: Context) -> bool:
        """Not what error feedback makes up for, nor with a delay, within which a state may be saved."""
        apart = num_encoding(ctx, bool(self.hierarchical)) > 1
        return apart and not self.error_feedback and not self.delay and loses_zeros(self._codec)

    def on_members_changed(self, ctx: Context) -> None:
        """Rounds in flight are lost; they begin again at the step at which they should have ended."""
        self._interrupted(ctx).update(bucket.index for bucket in ctx.buckets)

    def _interrupted(self, ctx: Context) -> set[int]:
        """Buckets whose round in flight, if any, was launched among other ranks."""
        return ctx.keep("interrupted", set)

    def _launch(self, ctx: Context, bucket: Bucket) -> None:
        # Here, not on the lane: the inner steps that follow move the weights. The anchor is first rounded to the
        # type of the weights: d must not hold what the last `x = anchor` rounded off, or the anchor would stick
        # to the grid of 16-bit numbers.
        d = self._own_change(ctx, bucket, self._delta(ctx, bucket))
        if self._clears_idle_rows(ctx):
            held = adam_slots_of(ctx)
            squares = {param: held[param].state["exp_avg_sq"] for param in bucket.params if param in held}
            note_used_rows(ctx, bucket, d, squares)
        ctx.launch(self.exchange, bucket, d)
        self._interrupted(ctx).discard(bucket.index)

    def _own_change(self, ctx: Context, bucket: Bucket, out: Tensor | None = None) -> Tensor:
        """The rounded anchor minus this rank's weights: [N]."""
        out = ctx.scratch("own change", bucket) if out is None else out
        anchor = ctx.tensor("anchor", bucket)
        if anchor.dtype == bucket.flat.dtype:
            return torch.sub(anchor, bucket.flat, out=out)
        return out.copy_(anchor).sub_(bucket.flat)

    def _due(self, ctx: Context, step: int) -> list[Bucket]:
        """The buckets whose round begins at the end of step `step`."""
        into, between = divmod(step % self.interval, self._spacing)
        fragment = (into - 1) % self.fragments
        return [] if between or step < 1 else [each for each in ctx.buckets if each.index % self.fragments == fragment]

    def _outer_step(self, ctx: Context, buckets: list[Bucket]) -> None:
        kept = self.mixing if self.mixing is not None else 0.5 if self.delay else 0.0
        lr, mu, nesterov = self._outer
        for bucket in buckets:
            anchor, d = ctx.tensor("anchor", bucket), self._delta(ctx, bucket)
            momentum = ctx.tensor("momentum", bucket).mul_(mu).add_(d) if mu else d
            if nesterov:
                anchor.add_(d, alpha=-lr).add_(momentum, alpha=-lr * mu)
            else:
                anchor.add_(momentum, alpha=-lr)
            if self._means(ctx):
                infer_round(ctx, bucket, self.interval, anchor)
            if kept:
                bucket.flat.mul_(kept).add_(anchor, alpha=1 - kept)
            else:
                bucket.flat.copy_(anchor)
            if self._means(ctx):
                begin_round(ctx, bucket, self.interval)

    def _delta(self, ctx: Context, bucket: Bucket) -> Tensor:
        """The pseudo-gradient, anchor minus weights: [N]; saved if a later step needs it."""
        return ctx.tensor("delta", bucket) if self.delay else ctx.scratch("delta", bucket)

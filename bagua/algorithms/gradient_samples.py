"""Second moments of Adam where each rank steps with its own gradients: without the noise that a mean would not have.

A local gradient is the true gradient plus the noise of a small batch, and Adam's v follows its square. Mean gradients
of R ranks have 1/R of the variance of that noise, so with them v is smaller and steps are longer. How much smaller is
measured here: every few steps the gradients are averaged, for nothing but the sums of squares of each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn

from bagua.algorithms.base import Bucket, Context
from bagua.algorithms.mean_moments import Slot, check_mean_moments, slots_of
from bagua.algorithms.second_moment import fits_adam, steps_of
from bagua.exchanges import Exchange, mix

__all__ = ["OPTION", "GradientSamples", "check_gradient_interval", "fit_gradient_interval", "sample_exchange"]

OPTION = "gradient_interval"
_INTERVAL = 8
_CODEC = "int4"  # its noise adds a few percent to the sums
_RECENT = 0.2  # weight of the newest sample; 0.1 followed a GPT with a warm-up of the learning rate too slowly


@dataclass(eq=False)
class _Samples:
    """What is not saved.

    Attributes:
        steps: of each parameter, as its optimizer counts, when its second moment was corrected last.
        counters: a counter of steps of each optimizer, as it was then: a loaded state brings others.
        own: buckets whose gradients are being averaged, and this rank's own sums of squares, [P] each.
    """

    steps: dict[nn.Parameter, int] = field(default_factory=dict)
    counters: list[object] = field(default_factory=list)
    own: list[tuple[Bucket, Tensor]] = field(default_factory=list)


def check_gradient_interval(interval: object, scale_second_moment: bool | None) -> None:
    """Check the option.

    Raises:
        ValueError: it is neither a number of steps nor None, or second moments are, or may be, scaled by an estimate.
    """
    if interval is not None and (isinstance(interval, bool) or not isinstance(interval, int) or interval < 0):
        raise ValueError(f"{OPTION}: expected a number of steps >= 0 or None, got {interval!r}")
    if interval and scale_second_moment is not False:
        raise ValueError(f"{OPTION} and scale_second_moment contradict: the first needs no estimate")


def fit_gradient_interval(interval: int | None, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Resolve `gradient_interval`: None becomes 8 with Adam and AdamW of torch, and 0 with others."""
    return interval if interval is not None else _INTERVAL if fits_adam(optimizers) else 0


@dataclass(frozen=True)
class GradientSamples:
    """Samples of mean gradients for one algorithm. Without an interval, or with a single rank, nothing happens.

    Args:
        algorithm: its name, for the notice.
        interval: steps between two samples of a bucket; 0 or None: there are none.
        hierarchical: as its other exchanges.

    State: `squares` [3, P] for a bucket of P parameters: running means of the sums of squares of the mean gradient and
        of this rank's own, and the number of samples.
    Bytes: those of a mean of the gradients in 4 bits, per interval.

    Examples:
        >>> samples = GradientSamples("low_precision_decentralized", 8, hierarchical=False)
    """

    algorithm: str
    interval: int | None
    hierarchical: bool

    def check(self, params: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Check that there are second moments to be corrected.

        Raises:
            ValueError: an optimizer is neither Adam nor AdamW, or is AMSGrad, or a parameter has 16 bits.
        """
        if self.interval:
            check_mean_moments(params, optimizers, OPTION)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """Bytes that a rank sends in a step for `n` elements, the mean over an interval."""
        return sample_exchange(self.hierarchical).bytes_per_rank(n, size) / self.interval if self.interval else 0.0

    def set_up(self, ctx: Context) -> None:
        """Begin without a sample: nothing is corrected before the first one."""
        if not self._used(ctx):
            return
        ctx.notice(f"{self.algorithm}: second moments of Adam are corrected to those of mean gradients ({OPTION})")
        ctx.prepare(sample_exchange(self.hierarchical))
        for bucket in ctx.buckets:
            ctx.tensor("squares", bucket, bucket.flat.new_zeros(3, len(bucket.params), dtype=torch.float32))
        self.drop(ctx)

    def begin(self, ctx: Context) -> None:
        """Before the optimizers' steps: where their state was loaded since the last ones, count from there."""
        if not self._used(ctx):
            return
        before, now = ctx.keep("samples", _Samples).counters, _counters(ctx)
        if len(before) != len(now) or any(old is not new for old, new in zip(before, now, strict=True)):
            self._count(ctx)

    @torch.no_grad()
    def correct(self, ctx: Context) -> None:
        """After the optimizers' steps, while the gradients are there: take a part of what they added to v back.

        With f the sum of squares of a parameter's mean gradient, divided by that of this rank's own, from 1/R to 1:

            v = b2 v_before + (1 - b2) f g^2
        """
        if not self._used(ctx):
            return
        samples, held = ctx.keep("samples", _Samples), slots_of(ctx)
        for bucket in ctx.buckets:
            parts = _parts_of_noise(ctx, bucket)
            for i, (param, step) in enumerate(zip(bucket.params, steps_of(held, bucket.params), strict=True)):
                stepped, samples.steps[param] = step == samples.steps.get(param, -1) + 1, step
                if stepped and param.grad is not None:
                    _take_back(held[param], param, parts[i])
        samples.counters = _counters(ctx)

    def launch(self, ctx: Context) -> None:
        """At the end of a step: begin to average the gradients of the buckets whose turn it is."""
        if not self._used(ctx):
            return
        assert self.interval
        samples = ctx.keep("samples", _Samples)
        for bucket in ctx.buckets:
            if ctx.step and (ctx.step + bucket.index) % self.interval:
                continue
            copy = ctx.scratch("gradient", bucket)
            views = bucket.split(copy)
            for view, param in zip(views, bucket.params, strict=True):
                view.zero_() if param.grad is None else view.copy_(param.grad)
            samples.own.append((bucket, _sums_of_squares(views)))
            ctx.launch(sample_exchange(self.hierarchical), bucket, copy)

    def take(self, ctx: Context) -> None:
        """At the end of a later step, or between two: wait for the means, and add them to what is known."""
        samples = ctx.keep("samples", _Samples)
        if not samples.own:
            return
        ctx.wait()
        for bucket, own in samples.own:
            known, mean = ctx.tensor("squares", bucket), _sums_of_squares(bucket.split(ctx.scratch("gradient", bucket)))
            fresh = (own > 0) & own.isfinite() & mean.isfinite()  # an unused parameter has none; overflows are no use
            weight = torch.where(fresh, (1 / (known[2] + 1)).clamp_min(_RECENT), 0.0)
            new = torch.where(fresh, torch.stack([mean, own]), 0.0)
            known[:2].lerp_(new, weight)
            known[2].add_(fresh)
        samples.own.clear()

    def drop(self, ctx: Context) -> None:
        """The state of the optimizers is another one: forget the means in flight."""
        if not self._used(ctx):
            return
        ctx.keep("samples", _Samples).own.clear()
        self._count(ctx)

    def _count(self, ctx: Context) -> None:
        samples, held = ctx.keep("samples", _Samples), slots_of(ctx)
        for bucket in ctx.buckets:
            samples.steps.update(zip(bucket.params, steps_of(held, bucket.params), strict=True))
        samples.counters = _counters(ctx)

    def _used(self, ctx: Context) -> bool:
        return bool(self.interval) and ctx.groups.size > 1


@lru_cache(maxsize=2)
def sample_exchange(hierarchical: bool) -> Exchange:
    """The mean over all ranks, in 4 bits."""
    return mix("complete", _CODEC, hierarchical=hierarchical)


def _counters(ctx: Context) -> list[object]:
    """The first counter of steps of each optimizer, which is the same tensor as long as the state is the same."""
    states = (optimizer.state.values() for optimizer in ctx.optimizers)
    return [next((state["step"] for state in each if "step" in state), None) for each in states]


def _parts_of_noise(ctx: Context, bucket: Bucket) -> Sequence[float] | Tensor:
    """1 - f for each parameter: numbers on a CPU, elsewhere on the device, for which nothing waits."""
    mean, own, count = ctx.tensor("squares", bucket)
    parts = torch.where(count > 0, 1 - (mean / own).clamp(1 / ctx.groups.size, 1), 0.0)
    return parts.tolist() if parts.device.type == "cpu" else parts


def _sums_of_squares(views: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(view) for view in views]).float().square_()


def _take_back(slot: Slot, param: nn.Parameter, part: float | Tensor) -> None:
    """Subtract `part` of what the optimizer has added to the second moment."""
    gradient, group, v = param.grad, slot.group, slot.state["exp_avg_sq"]
    assert gradient is not None
    share = (1 - float(group["betas"][1])) * part
    decays = bool(group.get("weight_decay")) and not group.get("decoupled_weight_decay", False)
    if decays:  # Adam adds it to the gradient, AdamW does not
        sign = -1 if group.get("maximize", False) else 1
        gradient = gradient.add(param, alpha=sign * float(group["weight_decay"]))
    if isinstance(share, Tensor):
        v.addcmul_(gradient * share, gradient, value=-1)
    elif share:
        v.addcmul_(gradient, gradient, value=-share)
    if decays:
        v.clamp_min_(0)  # the weights have moved since

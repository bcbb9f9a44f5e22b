"""Adam's moments in averages that arrive late: those of mean gradients, as the averages of snapshots show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bagua.algorithms.base import Bucket, Context
from bagua.algorithms.mean_moments import Slot, slots_of, sums_of_bits
from bagua.algorithms.round_moments import in_blocks

__all__ = ["DelayedMoments"]

# Of D: what the gradient of a round may be off by, because weights are rounded.
_ERROR = 0.2
_LONGEST = 3  # steps of any rank in a round, and of this rank until the mean of a round has come
_BITS = 15  # for the number of ranks that made so many steps


@dataclass(frozen=True)
class _Closed:
    """Of a round whose mean is awaited.

    Attributes:
        size: S, what the weights moved in its step for a gradient of one, times D.
        spoiled: nothing is to be inferred.
    """

    size: float
    spoiled: bool


@dataclass
class _Part:
    """One parameter of a bucket: numbers of the running round.

    Attributes:
        count: steps of its optimizer.
        steps: since the snapshot.
        rate: l of the last step.
        lag: L, what the weights have moved since the snapshot for a momentum of one at the snapshot, times D.
        spoiled: there are other steps in it than were recorded.
        closed: the round before.
    """

    count: int = 0
    steps: int = 0
    rate: float = 0.0
    lag: float = 0.0
    spoiled: bool = False
    closed: _Closed = _Closed(0.0, True)


class DelayedMoments:
    """Corrects the moments of `torch.optim.Adam` and `AdamW` while snapshots are averaged in the background.

    Every rank begins a round with a snapshot of its weights s_r. Once the mean has come, the rank adds mean - s_r, and
    the next round begins. So in effect each round begins at the mean of the snapshots, and what differs at the next one
    is what the rank's own steps have moved (`infer_round`; G, D and l are as there, g the gradient of this rank). After
    a round of one step that shows the mean momentum, and with it the mean gradient:

        G = g + D (s_r - mean) / (l (1 - b1))

    The mean comes when the rank has made another t steps, so what the moments lack has decayed by then:

        m += b1^t d,    v += b2^t (1 - b2) (G^2 - g^2),    d = (1 - b1) (G - g)

    And in these t steps the weights have moved without d. That is made up for, too:

        x += mean - s_r - L d / D,    L = sum_(j <= t) l_j b1^j

    Ranks whose mean came late make more than one step in a round, and have moved further with the momentum m_0 that
    they began with. With B = b1 + ... + b1^H and W = sum_(k <= H) (1 - b1^k) after H steps, and bars over means of the
    ranks, a rank with H = 1 has

        G = (W g + D (s_r - mean) / l - (mean of B - B) m_0) / mean of W

    So they tell each other these numbers. A rank infers nothing from a round in which it made more than one step, no
    rank from one in which another made more than 3. After `call_off` the first mean shows nothing.

    Bytes: none. Memory: two tensors of the size of the weights.
    Source: docs/design/0018-rounds-with-adam.md, averages that arrive late.

    Args:
        ctx: of the algorithm, in `setup`: the ranks hold equal weights, and about equal moments.
    """

    def __init__(self, ctx: Context) -> None:
        self.synced = True  # the running round began at the mean of all ranks
        self._steps = self._steps_closed = 0  # of this rank in the running round, and in the closed one
        held = slots_of(ctx)
        self._parts: dict[int, list[_Part]] = {}
        for bucket in ctx.buckets:
            parts = self._parts[bucket.index] = [_Part() for _ in bucket.params]
            ctx.scratch("own", bucket).zero_()
            # The momentum at the snapshot, with what was corrected since.
            firsts = bucket.split(ctx.scratch("first", bucket).zero_())
            for param, part, first in zip(bucket.params, parts, firsts, strict=True):
                if param in held:
                    part.count = held[param].step
                    first.copy_(held[param].state["exp_avg"])
        flags = [torch.zeros(len(bucket.params), dtype=torch.bool, device=bucket.flat.device) for bucket in ctx.buckets]
        self._changed, self._closed = flags, [each.clone() for each in flags]
        self._sums: list[Tensor] = []
        self.note_weights(ctx)

    def note_weights(self, ctx: Context) -> None:
        """At the end of a step: the weights are as the optimizer and the averages have left them."""
        self._sums = [sums_of_bits(bucket) for bucket in ctx.buckets]

    def look_for_changes(self, ctx: Context) -> None:
        """Before the optimizers' steps: note parameters that something else has changed, as a clamp or a mask."""
        for bucket, changed, sums in zip(ctx.buckets, self._changed, self._sums, strict=True):
            changed.logical_or_(sums != sums_of_bits(bucket))

    def record(self, ctx: Context) -> None:
        """After the optimizers' steps: keep what the weights have moved for a momentum of one."""
        held = slots_of(ctx)
        self._steps += 1
        for bucket in ctx.buckets:
            for param, part in zip(bucket.params, self._parts[bucket.index], strict=True):
                slot = held.get(param)
                if slot is None or slot.step == part.count:
                    continue
                part.spoiled |= slot.step != part.count + 1
                part.count, part.steps = slot.step, part.steps + 1
                beta1 = slot.group["betas"][0]
                part.rate = float(slot.group["lr"]) / (1 - beta1**part.count)
                part.lag += part.rate * beta1**part.steps

    @torch.no_grad()
    def close(self, ctx: Context) -> int:
        """The weights are those of a snapshot: a round ends, and the next one begins.

        Returns:
            What `infer` needs the sum of, over all ranks.
        """
        held, steps = slots_of(ctx), self._steps
        self._steps_closed, self._steps = steps, 0
        self._closed, self._changed = self._changed, self._closed
        for bucket, changed in zip(ctx.buckets, self._changed, strict=True):
            changed.zero_()
            views = _views(ctx, bucket)
            for param, part, own, first in zip(bucket.params, self._parts[bucket.index], *views, strict=True):
                slot = held.get(param)
                spoiled = part.spoiled or not self.synced or part.steps != 1 or not part.rate or slot is None
                part.steps, part.lag, part.spoiled = 0, 0.0, False
                part.closed = _Closed(0.0, True)
                if slot is not None:
                    m, beta1 = slot.state["exp_avg"], slot.group["betas"][0]
                    if not spoiled:
                        part.closed = _Closed(part.rate * (1 - beta1), False)
                        torch.sub(m, first, alpha=beta1, out=own)
                    first.copy_(m)
        return 1 << _BITS * (steps - 1) if self.synced and 0 < steps <= _LONGEST else 0

    def call_off(self) -> None:
        """The snapshots are not averaged: the next round does not begin at a mean."""
        self.synced = False
        for parts in self._parts.values():
            for part in parts:
                part.closed = _Closed(0.0, True)

    @torch.no_grad()
    def infer(self, ctx: Context, differences: Sequence[Tensor], snapshots: Sequence[Tensor], made: int) -> float:
        """The means are there, and not added yet: correct the moments.

        Shapes: differences, snapshots: by bucket, [N] mean - s_r, which becomes what is to be added, and s_r.

        Args:
            ctx: of the algorithm.
            differences, snapshots: see above.
            made: sum of what `close` returned on the ranks.

        Returns:
            The part of the weights whose moments were corrected, those left out as inexact or changed included.
        """
        self.synced, corrected = True, 0
        held, size = slots_of(ctx), ctx.groups.world.size
        means = [(made >> _BITS * steps & (1 << _BITS) - 1) / size for steps in range(_LONGEST)]
        if alike := 1.0 in means:  # then a parameter with one step has one everywhere
            means = [1.0, *[0.0] * (_LONGEST - 1)]
        known = alike or (sum(means) == 1 and self._steps_closed == 1)
        arrived = zip(ctx.buckets, differences, snapshots, self._closed, strict=True)
        for bucket, difference, snapshot, changed in arrived:
            views = (*_views(ctx, bucket), list(bucket.split(difference)), list(bucket.split(snapshot)))
            unchanged = ~changed  # stays on the device
            for i, (param, part) in enumerate(zip(bucket.params, self._parts[bucket.index], strict=True)):
                slot, closed = held.get(param), part.closed
                part.closed = _Closed(0.0, True)
                if not known or slot is None or closed.spoiled or part.spoiled or part.steps > _LONGEST:
                    continue
                if not param.numel():
                    continue
                formulas = _Formulas.of(slot, part, closed.size, means, torch.finfo(param.dtype).eps)
                for block in in_blocks(slot.state["exp_avg"], slot.state["exp_avg_sq"], *(each[i] for each in views)):
                    formulas.apply(block, unchanged[i])
                corrected += param.numel()
        return corrected / sum(param.numel() for bucket in ctx.buckets for param in bucket.params)


class _Formulas(NamedTuple):
    """The formulas of `DelayedMoments` with the numbers of one parameter.

    Attributes:
        scale, shift: D / S is the root of `scale` v, plus `shift`.
        share: 1 - b1.
        whole, own, momentum: 1 - b1 over the mean of W; what G - g has of (1 - b1) g, and of m at the snapshot.
        left1: b1^t.
        added: b2^t (1 - b2).
        late_by: L / S.
        largest: weights of which the differences are not mostly rounding.
    """

    scale: float
    shift: float
    share: float
    whole: float
    own: float
    momentum: float
    left1: float
    added: float
    late_by: float
    largest: float

    @classmethod
    def of(cls, slot: Slot, part: _Part, moved: float, means: Sequence[float], eps: float) -> _Formulas:
        """Those of the round whose mean has come, `part.steps` steps after its snapshot.

        Args:
            slot, part: of the parameter.
            moved: S.
            means: parts of the ranks that made one step, two, and so on.
            eps: of the weights.
        """
        beta1, beta2 = slot.group["betas"]
        drifts = [sum(beta1**k for k in range(1, steps + 1)) for steps in range(1, len(means) + 1)]
        mean_drift = sum(ranks * drift for ranks, drift in zip(means, drifts, strict=True))
        mean_whole = sum(ranks * steps for steps, ranks in enumerate(means, 1)) - mean_drift
        momentum = (beta1 - mean_drift) / mean_whole / beta1  # m_0 is m at the snapshot, less the own share, over b1
        return cls(
            scale=1 / (1 - beta2**part.count) / moved**2,
            shift=slot.group["eps"] / moved,
            share=1 - beta1,
            whole=(1 - beta1) / mean_whole,
            own=1 / mean_whole - 1 / (1 - beta1) - momentum,
            momentum=momentum,
            left1=beta1**part.steps,
            added=beta2**part.steps * (1 - beta2),
            late_by=part.lag / moved,
            largest=moved * _ERROR / eps,
        )

    def apply(self, block: tuple[Tensor, ...], unchanged: Tensor) -> None:
        """Correct m and v, and the difference.

        Args:
            block: parts of m and v, of (1 - b1) g, of m at the snapshot, of mean - s_r and of s_r.
            unchanged: whether only the optimizer has changed the parameter.
        """
        m, v, own, first, difference, snapshot = block
        ahead = torch.mul(v, self.scale).sqrt_().add_(self.shift)  # D / S
        apart = torch.mul(ahead, difference).neg_()
        if self.whole != 1:
            apart.mul_(self.whole).add_(own, alpha=self.own).add_(first, alpha=self.momentum)
        gradient = own.div(self.share)
        gradients = torch.add(gradient, apart)
        # Not below zero, by rounding, where nothing but g has come since the snapshot.
        mean_v = torch.addcmul(v, gradient, gradient, value=-self.added).clamp_(min=0.0)
        mean_v.addcmul_(gradients, gradients, value=self.added)
        if v.device.type == "cpu" and unchanged and snapshot.abs().max() <= self.largest:  # mostly
            v.copy_(mean_v)
        else:
            exact = (snapshot.abs() <= self.largest).logical_and_(unchanged)
            v.copy_(torch.where(exact, mean_v, v))
            apart.mul_(exact)
        m.add_(apart, alpha=self.left1 * self.share)
        first.add_(apart, alpha=self.share)
        if self.late_by:
            difference.addcdiv_(apart, ahead, value=-self.share * self.late_by)


def _views(ctx: Context, bucket: Bucket) -> tuple[list[Tensor], list[Tensor]]:
    """By parameter: (1 - b1) g of the closed round, and m at the snapshot."""
    own, first = (list(bucket.split(ctx.scratch(name, bucket))) for name in ("own", "first"))
    return own, first

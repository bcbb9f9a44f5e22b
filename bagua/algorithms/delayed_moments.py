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
# Steps of a round, and until its mean has come. With more of either the loss is larger than without any correction, and
# with two of both training diverges: what was not corrected in time comes back L / S times as large.
_LONGEST, _LATEST = 2, 1
_NAMES = ("momenta", "first", "second", "own", "seen", "correction")


@dataclass(frozen=True)
class _Closed:
    """Of a round whose mean is awaited: the numbers of `_Part` at its end, and whether nothing is to be inferred."""

    steps: int
    size: float
    lag: float
    count: int
    spoiled: bool


_NOTHING = _Closed(0, 0.0, 0.0, 0, True)


@dataclass
class _Part:
    """One parameter of a bucket: numbers of the running round.

    Attributes:
        count: steps of its optimizer.
        steps: since the snapshot.
        size: S, what the weights have moved in them for a gradient of one, times D.
        lag: L, the same of the momentum at the snapshot, in steps until the mean arrived.
        arrived: the mean of the last snapshots is there.
        spoiled: there are other steps in it than were recorded.
        closed: the round before, until its mean has come.
    """

    count: int = 0
    steps: int = 0
    size: float = 0.0
    lag: float = 0.0
    arrived: bool = True
    spoiled: bool = False
    closed: _Closed = _NOTHING


class DelayedMoments:
    """Corrects the moments of `torch.optim.Adam` and `AdamW` while snapshots are averaged in the background.

    Every rank begins a round with a snapshot of its weights s_r. Once the mean has come, the rank adds mean - s_r. So
    in effect each round begins at the mean of the snapshots, and what differs at the next one is what the rank's own
    steps have moved, as after local steps (`infer_round`; G, G_r, D, S, K, n and w are as there). Two things are
    different. The mean comes when the rank has made another t steps, so what the moments lack has decayed by then:

        m += b1^t d,    d = (1 - b1^H) (G - G_r)
        v += b2^t (v_mean - v_s),    v_mean = b2^H v_0 + (1 - b2^H) (G^2 + (n - G^2) (1 - K) / (R - K))

    And in these t steps the weights have moved without d. So the next snapshots differ by it, too:

        G = G_r + (D (s_r - mean) - L d) / S,    L = sum_(j <= t) l_j b1^j

    v_s is the second moment at the snapshot, v_0 what v_mean was at the one before. Ranks may make different numbers of
    steps in a round; S is the rank's own. Nothing is corrected after rounds of more than 2 steps, nor if the mean comes
    after more than one. After `call_off` the first mean shows nothing.

    Bytes: none. Memory: six tensors of the size of the weights.
    Source: docs/design/0018-rounds-with-adam.md, averages that arrive late.

    Args:
        ctx: of the algorithm, in `setup`: the ranks hold equal weights, and about equal moments.
    """

    def __init__(self, ctx: Context) -> None:
        self.synced = True  # the running round began at the mean of all ranks
        held = slots_of(ctx)
        self._parts: dict[int, list[_Part]] = {}
        for bucket in ctx.buckets:
            for name in _NAMES:
                ctx.scratch(name, bucket).zero_()
            parts = self._parts[bucket.index] = [_Part() for _ in bucket.params]
            views = _views(ctx, bucket, "first", "second")
            for param, part, first, second in zip(bucket.params, parts, *views, strict=True):
                if param in held:
                    part.count = held[param].step
                    first.copy_(held[param].state["exp_avg"])
                    second.copy_(held[param].state["exp_avg_sq"])
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

    @torch.no_grad()
    def record(self, ctx: Context) -> None:
        """After the optimizers' steps: add up momenta, and what the weights have moved for a gradient of one."""
        held = slots_of(ctx)
        for bucket in ctx.buckets:
            momenta, firsts = _views(ctx, bucket, "momenta", "first")
            for param, part, sums, first in zip(bucket.params, self._parts[bucket.index], momenta, firsts, strict=True):
                slot = held.get(param)
                if slot is None or slot.step == part.count:
                    continue
                part.spoiled |= slot.step != part.count + 1
                part.count, part.steps = slot.step, part.steps + 1
                beta1 = slot.group["betas"][0]
                sums.add_(slot.state["exp_avg"]).sub_(first, alpha=beta1**part.steps)
                rate = float(slot.group["lr"]) / (1 - beta1**part.count)
                part.size += rate * (1 - beta1**part.steps)
                part.lag += 0.0 if part.arrived else rate * beta1**part.steps

    @torch.no_grad()
    def close(self, ctx: Context) -> None:
        """The weights are those of a snapshot: a round ends, and the next one begins."""
        held = slots_of(ctx)
        self._closed, self._changed = self._changed, self._closed
        for bucket, changed in zip(ctx.buckets, self._changed, strict=True):
            changed.zero_()
            views = _views(ctx, bucket, "momenta", "own", "first", "seen")
            for param, part, momenta, own, first, seen in zip(
                bucket.params, self._parts[bucket.index], *views, strict=True
            ):
                spoiled = part.spoiled or not self.synced or not 0 < part.steps <= _LONGEST or not part.size
                part.closed = _Closed(part.steps, part.size, part.lag, part.count, spoiled)
                part.steps, part.size, part.lag, part.arrived, part.spoiled = 0, 0.0, 0.0, False, False
                own.copy_(momenta)
                momenta.zero_()
                if param in held:
                    first.copy_(held[param].state["exp_avg"])
                    seen.copy_(held[param].state["exp_avg_sq"])

    def call_off(self) -> None:
        """The snapshots are not averaged: the next round does not begin at a mean."""
        self.synced = False
        for parts in self._parts.values():
            for part in parts:
                part.arrived = True
                part.closed = _NOTHING

    @torch.no_grad()
    def infer(self, ctx: Context, differences: Sequence[Tensor], snapshots: Sequence[Tensor]) -> None:
        """The means are there, and not added yet: correct the moments.

        Shapes: differences, snapshots: by bucket, [N] mean - s_r and s_r.
        """
        self.synced = True
        held, size = slots_of(ctx), ctx.groups.world.size
        arrived = zip(ctx.buckets, differences, snapshots, self._closed, strict=True)
        for bucket, difference, snapshot, changed in arrived:
            views = _views(ctx, bucket, "own", "first", "second", "seen", "correction")
            moved = bucket.split(difference), bucket.split(snapshot)
            unchanged = ~changed  # stays on the device
            for i, (param, part) in enumerate(zip(bucket.params, self._parts[bucket.index], strict=True)):
                part.arrived = True
                slot, tensors = held.get(param), [each[i] for each in (*views, *moved)]
                if slot is None or not param.numel():
                    continue
                if part.closed.spoiled or part.spoiled or part.steps > _LATEST:
                    _, _, second, seen, correction, *_ = tensors
                    correction.zero_()
                    second.copy_(seen)
                    continue
                formulas = _Formulas.of(slot, part, size, torch.finfo(param.dtype).eps)
                for block in in_blocks(slot.state["exp_avg"], slot.state["exp_avg_sq"], *tensors):
                    formulas.apply(block, unchanged[i])


class _Formulas(NamedTuple):
    """The formulas of `DelayedMoments` with the numbers of one parameter.

    Attributes:
        scale, shift: D / S is the root of `scale` v, plus `shift`.
        lag: L / S.
        whole: sum of the weights w.
        share: 1 - b1^H.
        kept: b2^H.
        mix: the weight of n beside that of G^2.
        left1, left2: b1^t and b2^t.
        largest: weights of which the differences are not mostly rounding.
    """

    scale: float
    shift: float
    lag: float
    whole: float
    share: float
    kept: float
    mix: float
    left1: float
    left2: float
    largest: float

    @classmethod
    def of(cls, slot: Slot, part: _Part, size: int, eps: float) -> _Formulas:
        """Those of the round whose mean has come, `part.steps` steps after its snapshot."""
        beta1, beta2 = slot.group["betas"]
        closed = part.closed
        steps, moved = closed.steps, closed.size
        shares = [1 - beta1**k for k in range(1, steps + 1)]
        whole = sum(shares)
        spread = sum(share**2 for share in shares) / whole**2
        return cls(
            scale=1 / (1 - beta2**closed.count) / moved**2,
            shift=slot.group["eps"] / moved,
            lag=closed.lag / moved,
            whole=whole,
            share=shares[-1],
            kept=beta2**steps,
            mix=(1 - spread) / (size - spread),
            left1=beta1**part.steps,
            left2=beta2**part.steps,
            largest=moved * _ERROR / eps,
        )

    def apply(self, block: tuple[Tensor, ...], unchanged: Tensor) -> None:
        """Correct m and v, and what the running round needs of the correction.

        Args:
            block: parts of m and v, of the sum of the rank's own momenta, of the first moment at the snapshot, of v_0,
                of v_s, of the last d, of mean - s_r and of s_r.
            unchanged: whether only the optimizer has changed the parameter.
        """
        m, v, own, first, second, seen, correction, difference, snapshot = block
        apart = seen.mul(self.scale).sqrt_().add_(self.shift).mul_(difference).neg_().sub_(correction, alpha=self.lag)
        of_all = torch.add(apart, own, alpha=1 / self.whole)
        second.mul_(self.kept).lerp_(seen, self.mix)
        second.addcmul_(of_all, of_all, value=(1 - self.kept) * (1 - self.mix))
        exact = (snapshot.abs() <= self.largest).logical_and_(unchanged)
        second.copy_(torch.where(exact, second, seen))
        torch.mul(apart, self.share, out=correction).mul_(exact)
        m.add_(correction, alpha=self.left1)
        first.add_(correction)
        # Not below zero: where nothing has come since the snapshot, rounding could leave less.
        v.add_(second - seen, alpha=self.left2).clamp_(min=0.0)


def _views(ctx: Context, bucket: Bucket, *names: str) -> list[list[Tensor]]:
    return [list(bucket.split(ctx.scratch(name, bucket))) for name in names]

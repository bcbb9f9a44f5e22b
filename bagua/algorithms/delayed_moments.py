"""Adam's moments in averages that arrive late: those of mean gradients, as the averages of snapshots show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bagua.algorithms.base import Bucket, Context
from bagua.algorithms.mean_moments import Slot, slots_of, sum_of_bits, sums_of_bits
from bagua.algorithms.round_moments import in_blocks
from bagua.codecs import backends

__all__ = ["DelayedMoments"]

# Of D: what the gradient of a round may be off by, because weights are rounded.
_ERROR = 0.2
_FP32 = torch.float32
_TINY = 1e-30  # to divide by, where neither v nor eps is more than zero
_SMALLEST = 1e-15  # S, as of a schedule that ends near zero: 1 / S^2 must be finite in fp32
_LONGEST = 3  # steps of any rank in a round, and of this rank until the mean of a round has come
_LOOKED_AT = 1 << 15  # elements of a parameter
_GAIN = 0.5  # the part of a correction that is made where all ranks made several steps: more is less stable


@dataclass(frozen=True)
class _Closed:
    """Of a round whose mean is awaited.

    Attributes:
        size: S, what the weights moved in its steps for a gradient of one, times D.
        steps: H; 0: nothing is to be inferred.
    """

    size: float
    steps: int


@dataclass
class _Part:
    """One parameter of a bucket: numbers of the running round.

    Attributes:
        count: steps of its optimizer.
        steps: since the snapshot.
        size: S, what the weights have moved since the snapshot for a gradient of one, times D.
        lag: L, what the weights have moved since the snapshot for a momentum of one at the snapshot, times D.
        spoiled: there are other steps in it than were recorded.
        closed: the round before.
    """

    count: int = 0
    steps: int = 0
    size: float = 0.0
    lag: float = 0.0
    spoiled: bool = False
    closed: _Closed = _Closed(0.0, 0)


class DelayedMoments:
    """Corrects the moments of `torch.optim.Adam` and `AdamW` while snapshots are averaged in the background.

    Every rank begins a round with a snapshot of its weights s_r. Once the mean has come, the rank adds mean - s_r, and
    the next round begins. So in effect each round begins at the mean of the snapshots, and what differs at the next one
    is what the rank's own steps have moved (`infer_round`; D and l are as there, g the gradient of this rank). After a
    round of one step that shows the mean momentum, and with it the mean gradient:

        G = g + D (s_r - mean) / (l (1 - b1))

    The mean comes when the rank has made another t steps, so what the moments lack has decayed by then:

        m += b1^t d,    v += b2^t (1 - b2) (G^2 - g^2),    d = (1 - b1) (G - g)

    And in these t steps the weights have moved without d. That is made up for, too:

        x += mean - s_r - L d / D,    L = sum_(j <= t) l_j b1^j

    This is exact if the D are equal. It is an estimate for ranks that made H > 1 steps in a round because a mean came
    late, and in rounds in which ranks made different numbers of steps: those with more have moved further with the
    momentum m_0 that all began with. So they tell each other the numbers, for each parameter. With B = b1 + ... + b1^H,
    W = sum_(k <= H) w_k, w_k = 1 - b1^k, and bars over means of the ranks,

        g = (m_s - b1^H m_0) / (1 - b1^H),    d = (1 - b1^H) (G - g)
        G = (W g + D (s_r - mean) / l - (mean of B - B) m_0) / mean of W
        v += b2^t (1 - b2) H / K (G^2 - g^2),    K = sum w^2 / W^2

    m_s is the momentum at the snapshot; K is the part of a gradient's variance that g has. v keeps at least 1/R of
    itself then, and if all ranks made several steps half of d is added: all of it is less stable. From a round in which
    a rank made more than 3 steps of a parameter, or fewer than of others while other ranks did not, as it got no
    gradient there, no rank infers anything for it, and a rank nothing if the mean comes after more than 3, or where an
    estimate is not plausible (`_Formulas.is_plausible`). After `call_off` the first mean shows nothing.

    Bytes: 6 numbers for each parameter. Memory: two tensors of the size of the weights.
    Source: docs/design/0018-rounds-with-adam.md, averages that arrive late.

    Args:
        ctx: of the algorithm, in `setup`: the ranks hold equal weights, and about equal moments.
    """

    def __init__(self, ctx: Context) -> None:
        self.synced = True  # the running round began at the mean of all ranks
        self._steps = 0  # of this rank in the running round
        self._split: dict[tuple[int, int], tuple[Tensor, list[Tensor]]] = {}
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
        # Where something else has changed a parameter, sums of each; else one sum of a bucket, which costs less.
        self._apart = [bucket.flat.device.type != "cpu" for bucket in ctx.buckets]
        self._sums: list[Tensor] = []
        self.note_weights(ctx)

    def note_weights(self, ctx: Context) -> None:
        """At the end of a step: the weights are as the optimizer and the averages have left them."""
        self._sums = [
            sums_of_bits(bucket) if apart else sum_of_bits(bucket.flat)
            for bucket, apart in zip(ctx.buckets, self._apart, strict=True)
        ]

    def look_for_changes(self, ctx: Context) -> None:
        """Before the optimizers' steps: note parameters that something else has changed, as a clamp or a mask.

        The first time it is all of the bucket on a CPU.
        """
        for i, (bucket, changed, sums) in enumerate(zip(ctx.buckets, self._changed, self._sums, strict=True)):
            if self._apart[i]:
                changed.logical_or_(sums != sums_of_bits(bucket))
            elif sums != sum_of_bits(bucket.flat):
                changed.fill_(True)
                self._apart[i] = True

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
                beta1 = float(slot.group["betas"][0])
                rate = float(slot.group["lr"]) / (1 - beta1**part.count)
                part.size += rate * (1 - beta1**part.steps)
                part.lag += rate * beta1**part.steps

    @torch.no_grad()
    def close(self, ctx: Context) -> Tensor:
        """The weights are those of a snapshot: a round ends, and the next one begins.

        Shapes: result: [6, P] fp32 for P parameters, of which `infer` needs the sum over all ranks: 1 in the row of the
            steps that this rank made, three rows further down if it made more of others.
        """
        held, made, steps = slots_of(ctx), list[int](), self._steps
        self._steps = 0
        self._closed, self._changed = self._changed, self._closed
        for bucket, changed in zip(ctx.buckets, self._changed, strict=True):
            changed.zero_()
            views = self._views_of(bucket, ctx.scratch("own", bucket), ctx.scratch("first", bucket))
            for param, part, own, first in zip(bucket.params, self._parts[bucket.index], *views, strict=True):
                slot = held.get(param)
                known = self.synced and not part.spoiled and part.size >= _SMALLEST and part.steps <= _LONGEST
                part.closed = _Closed(part.size, part.steps) if known else _Closed(0.0, 0)
                rests = part.closed.steps and part.steps < steps
                made.append(part.closed.steps + _LONGEST if rests else part.closed.steps)
                if slot is not None:
                    m, beta1 = slot.state["exp_avg"], float(slot.group["betas"][0])
                    torch.sub(m, first, alpha=beta1**part.steps, out=own)
                    first.copy_(m)
                part.steps, part.size, part.lag, part.spoiled = 0, 0.0, 0.0, False
        rows = [[float(each == row) for each in made] for row in range(1, 2 * _LONGEST + 1)]
        return torch.tensor(rows, dtype=_FP32, device=ctx.buckets[0].flat.device)

    def _views_of(self, bucket: Bucket, *flats: Tensor) -> list[list[Tensor]]:
        """Parts of tensors that are mostly the same each time, by parameter: with many parameters it takes long."""
        found = []
        for flat in flats:
            key = (bucket.index, flat.data_ptr())
            if key not in self._split or self._split[key][0] is not flat:
                self._split[key] = flat, list(bucket.split(flat))
            found.append(self._split[key][1])
        return found

    def call_off(self) -> None:
        """The snapshots are not averaged: the next round does not begin at a mean."""
        self.synced = False
        for parts in self._parts.values():
            for part in parts:
                part.closed = _Closed(0.0, 0)

    @torch.no_grad()
    def infer(self, ctx: Context, differences: Sequence[Tensor], snapshots: Sequence[Tensor], made: Tensor) -> float:
        """The means are there, and not added yet: correct the moments.

        Shapes: differences, snapshots: by bucket, [N] mean - s_r, which becomes what is to be added, and s_r;
            made: [6, P].

        Args:
            ctx: of the algorithm.
            differences, snapshots: see above.
            made: sum of what `close` returned on the ranks.

        Returns:
            The part of the weights whose moments were corrected, those left out as inexact or changed included.
        """
        self.synced, corrected = True, 0
        held, size = slots_of(ctx), ctx.groups.world.size
        made_by = iter(made.t().tolist())  # of each parameter: how many ranks made one step, two, and so on
        formulas: dict[tuple[Any, ...], _Formulas] = {}  # parameters of a group mostly have the same
        arrived = zip(ctx.buckets, differences, snapshots, self._closed, strict=True)
        for bucket, difference, snapshot, changed in arrived:
            flats = ctx.scratch("own", bucket), ctx.scratch("first", bucket), difference, snapshot
            views, kernel = self._views_of(bucket, *flats), backends.kernels(difference.device).correct_late
            unchanged = (~changed).tolist() if changed.device.type == "cpu" else ~changed  # which stays on the device
            for i, (param, part) in enumerate(zip(bucket.params, self._parts[bucket.index], strict=True)):
                slot, closed, counts = held.get(param), part.closed, _ranks_by_steps(next(made_by), size)
                part.closed = _Closed(0.0, 0)
                if counts is None or slot is None or not closed.steps or part.spoiled or part.steps > _LONGEST:
                    continue
                if not param.numel():
                    continue
                key = (id(slot.group), part.count, part.steps, part.lag, closed, *counts, param.dtype)
                if key not in formulas:
                    means = [count / size for count in counts]
                    formulas[key] = _Formulas.of(slot, part, closed, means, size, torch.finfo(param.dtype).eps)
                tensors = slot.state["exp_avg"], slot.state["exp_avg_sq"], *(each[i] for each in views)
                fits = unchanged[i]
                if counts[0] != size and fits is not False:
                    fits = formulas[key].is_plausible(tensors[1:], fits)
                formulas[key].apply(tensors, fits, kernel)
                corrected += param.numel()
        return corrected / sum(param.numel() for bucket in ctx.buckets for param in bucket.params)


def _ranks_by_steps(made: Sequence[float], size: int) -> Sequence[float] | None:
    """How many ranks made one step of a parameter, two, and so on; None: a rank made none, or too many.

    None, too, if some ranks made fewer of it than of other parameters, unless all made as many.
    """
    whole, rests = made[:_LONGEST], made[_LONGEST:]
    all_ranks = [mine + others for mine, others in zip(whole, rests, strict=True)]
    return all_ranks if size in all_ranks else whole if sum(whole) == size else None


class _Formulas(NamedTuple):
    """The formulas of `DelayedMoments` with the numbers of one parameter. Compiled code has them in this order.

    Attributes:
        scale, shift: D / S is the root of `scale` v, plus `shift`.
        share: 1 - b1^H.
        whole, own, momentum: what G - g has of D / S (s_r - mean), of `share` g, and of m at the snapshot.
        added: what v has more for a larger square of the gradient.
        least: the least part of v that stays.
        largest: weights of which the differences are not mostly rounding.
        to_momentum, change, late: what is added of G - g to m and to that of the snapshot, and of the weights' own
            part of it to the difference.
    """

    scale: float
    shift: float
    share: float
    whole: float
    own: float
    momentum: float
    added: float
    least: float
    largest: float
    to_momentum: float
    change: float
    late: float

    @classmethod
    def of(cls, slot: Slot, part: _Part, closed: _Closed, means: Sequence[float], size: int, eps: float) -> _Formulas:
        """Those of the round whose mean has come, `part.steps` steps after its snapshot.

        Args:
            slot, part: of the parameter.
            closed: the round.
            means: parts of the ranks that made one step, two, and so on.
            size: R.
            eps: of the weights.
        """
        beta1, beta2 = map(float, slot.group["betas"])
        steps, moved = closed.steps, closed.size
        drifts = [sum(beta1**k for k in range(1, each + 1)) for each in range(1, len(means) + 1)]
        mean_drift = sum(ranks * drift for ranks, drift in zip(means, drifts, strict=True))
        mean_whole = sum(ranks * each for each, ranks in enumerate(means, 1)) - mean_drift
        drift, whole, share = drifts[steps - 1], steps - drifts[steps - 1], 1 - beta1**steps
        # m_0 is m at the snapshot less own, over b1^H.
        momentum = (drift - mean_drift) / mean_whole / beta1**steps if beta1 else 0.0
        spread = sum((1 - beta1**k) ** 2 for k in range(1, steps + 1)) / whole**2
        change = share * (_GAIN if means[0] == 0.0 else 1.0)
        return cls(
            scale=1 / (1 - beta2**part.count) / moved**2,
            shift=max(slot.group["eps"] / moved, _TINY),
            share=share,
            whole=whole / mean_whole,
            own=(whole / mean_whole - 1) / share - momentum,
            momentum=momentum,
            added=beta2**part.steps * (1 - beta2) * steps / spread,
            least=0.0 if means[0] == 1.0 else 1 / size,
            largest=moved * _ERROR / eps,
            to_momentum=beta1**part.steps * change,
            change=change,
            late=change * part.lag / moved,
        )

    def is_plausible(self, tensors: Sequence[Tensor], unchanged: Tensor | bool) -> Tensor | bool:
        """Whether G is not larger than g, as a mean is not; if it is, what the formulas leave out is most of it.

        Where gradients hardly differ from step to step, unequal D would make each other more unequal otherwise.

        Args:
            tensors: v, `share` g, m at the snapshot, mean - s_r, and s_r; some of their elements are looked at.
            unchanged: the result, if G is not larger.
        """
        apart_by = -(-tensors[0].numel() // _LOOKED_AT)
        v, own, first, difference = (each.reshape(-1)[::apart_by] for each in tensors[:4])
        gradients, gradient = self._gradients(v, own, first, difference)
        gradients = torch.where(gradients.isfinite(), gradients, 0.0)  # v may have overflowed
        fits = torch.linalg.vector_norm(gradients) <= torch.linalg.vector_norm(gradient)
        return bool(fits) if v.device.type == "cpu" else fits & torch.as_tensor(unchanged, device=v.device)

    def _gradients(self, v: Tensor, own: Tensor, first: Tensor, difference: Tensor) -> tuple[Tensor, Tensor]:
        """G and g."""
        ahead = torch.mul(v, self.scale).sqrt_().add_(self.shift)  # D / S
        apart = ahead.mul_(difference).mul_(-self.whole)
        if self.momentum:
            apart.add_(own, alpha=self.own).add_(first, alpha=self.momentum)
        gradient = own.div(self.share)
        return apart.add_(gradient), gradient

    def apply(
        self,
        tensors: Sequence[Tensor],
        unchanged: Tensor | bool,
        kernel: Callable[[Sequence[Tensor], Sequence[float]], None] | None,
    ) -> None:
        """Correct m and v, and the difference.

        Args:
            tensors: m and v, `share` g, m at the snapshot, mean - s_r and s_r; the last four have the same strides.
            unchanged: whether only the optimizer has changed the parameter.
            kernel: compiled code for dense fp32 tensors.
        """
        if unchanged is False:
            return
        m, v, own = tensors[:3]
        if kernel is not None and m.dtype is v.dtype is own.dtype is _FP32 and m.stride() == v.stride() == own.stride():
            kernel(tensors, self)
            return
        for block in in_blocks(*tensors):
            self.apply_torch(block, torch.as_tensor(unchanged, device=m.device))

    def apply_torch(self, tensors: Sequence[Tensor], unchanged: Tensor) -> None:
        """As `apply`, in torch's operations."""
        m, v, own, first, difference, snapshot = tensors
        exact = (snapshot.abs() <= self.largest).logical_and_(unchanged)
        ahead = torch.mul(v, self.scale).sqrt_().add_(self.shift)  # D / S
        exact &= ahead < math.inf  # v may have overflowed
        apart = torch.mul(ahead, difference).mul_(-self.whole)
        if self.momentum:
            apart.add_(own, alpha=self.own).add_(first, alpha=self.momentum)
        gradient = own.div(self.share)
        gradients = torch.add(gradient, apart)
        mean_v = torch.addcmul(v, gradient, gradient, value=-self.added).clamp_(min=0.0)
        mean_v.addcmul_(gradients, gradients, value=self.added)
        torch.maximum(mean_v, v * self.least, out=mean_v)
        v.copy_(torch.where(exact, mean_v, v))
        apart = torch.where(exact, apart, 0.0)
        m.add_(apart, alpha=self.to_momentum)
        first.add_(apart, alpha=self.change)
        difference.addcdiv_(apart, ahead, value=-self.late)

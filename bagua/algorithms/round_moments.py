"""Adam's moments after a round of local steps: those of mean gradients, as the average of the weights shows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bagua.algorithms.base import Bucket, Context
from bagua.algorithms.mean_moments import Slot, adam_params_of, adam_slots_of, sums_of_bits
from bagua.algorithms.row_flags import as_rows, num_rows
from bagua.algorithms.step_votes import launch_votes, row_counts_of, votes_of
from bagua.codecs import Codec, backends

__all__ = [
    "begin_round",
    "in_blocks",
    "infer_round",
    "launch_round_votes",
    "look_for_changes",
    "record_local_step",
    "set_up_rounds",
    "shows_mean_steps",
]

# Of D: what the gradient of a round may be off by, because weights are rounded.
_ERROR = 0.2
_LONGEST, _BITS = 4, 3
_BITS_OF_FEW_STEPS = 4  # 3 lose more than the moments gain: a step's own change is small beside that by the momentum
_BLOCK = 1 << 16  # elements
_SPOILED = -(1 << 40)  # steps taken in a round from which nothing is inferred
_EXACT = 1 << 24  # integers below are exact in fp32
# Rows of `skips`: steps of the round in which a parameter made none, before its second one and after it; and how many
# of the latter were expected.
_EARLY, _LATE, _EXPECTED = range(3)


def shows_mean_steps(interval: int, codec: Codec) -> bool:
    """Whether averages show the mean gradients well enough for a default: after few steps, and with little noise."""
    many = 1 << 20
    return interval <= _LONGEST and 8 * codec.wire_bytes(many) >= _BITS * many


def set_up_rounds(ctx: Context, interval: int, codec: Codec) -> None:
    """Begin a round from the moments that the optimizers hold.

    Tensors are as long as the parameters that Adam trains: beside Muon, which trains most of a model, next to nothing
    is kept.

    Args:
        ctx: of the algorithm, in `setup`.
        interval: H, local steps of a round.
        codec: of the averages.
    """
    many = 1 << 20
    ctx.keep("least steps", lambda: 1 if 8 * codec.wire_bytes(many) >= _BITS_OF_FEW_STEPS * many else interval)
    for bucket in ctx.buckets:
        params, device = _trained(ctx, bucket), bucket.flat.device
        for name in ("momenta", "second"):
            ctx.tensor(name, bucket, bucket.flat.new_zeros(sum(each.numel() for each in params))).zero_()
        for name, kind in (("size", torch.float64), ("counts", torch.int64), ("taken", torch.int64)):
            ctx.tensor(name, bucket, torch.zeros(len(params), dtype=kind, device="cpu")).zero_()
        ctx.tensor("skips", bucket, torch.zeros(3, len(params), dtype=torch.int64, device="cpu")).zero_()
        ctx.tensor("sums", bucket, sums_of_bits(bucket, params))
        ctx.tensor("changed", bucket, torch.zeros(len(params), dtype=torch.bool, device=device))
        begin_round(ctx, bucket, interval)
        if ctx.step % interval:  # the round is not whole
            ctx.tensor("taken", bucket).fill_(_SPOILED)


@torch.no_grad()
def begin_round(ctx: Context, bucket: Bucket, interval: int) -> None:
    """After weights and moments were set: no local step has been made since."""
    held, counts, skips = adam_slots_of(ctx), ctx.tensor("counts", bucket), ctx.tensor("skips", bucket)
    # Optimizers that take turns mostly do so as in the last round in which the parameter was trained.
    skips[_EXPECTED].copy_(torch.where(ctx.tensor("taken", bucket) > 0, skips[_LATE], skips[_EXPECTED]))
    skips[:_EXPECTED].zero_()
    now: list[int] = []
    for (param, momenta, second), fewer in zip(_parts(ctx, bucket), skips[_EXPECTED].tolist(), strict=True):
        slot = held.get(param)
        now.append(0 if slot is None else slot.step)
        if slot is None:
            continue
        beta1 = slot.group["betas"][0]
        # What the sum of the momenta holds of the first one: less of it remains in each.
        torch.mul(slot.state["exp_avg"], -_remaining(beta1, interval - fewer), out=momenta)
        second.copy_(slot.state["exp_avg_sq"])
    counts.copy_(torch.tensor(now, dtype=torch.int64, device="cpu"))
    for name in ("size", "taken", "changed"):
        ctx.tensor(name, bucket).zero_()
    ctx.tensor("sums", bucket).copy_(sums_of_bits(bucket, _trained(ctx, bucket)))


def _remaining(beta1: float, steps: int) -> float:
    """b1 + ... + b1^H: what the sum of the momenta of H steps holds of the momentum before them."""
    return sum(beta1**k for k in range(1, steps + 1))


def look_for_changes(ctx: Context) -> None:
    """Before the optimizers' steps: note parameters that something else has changed, as a clamp or a mask."""
    for bucket in ctx.buckets:
        sums = sums_of_bits(bucket, _trained(ctx, bucket))
        ctx.tensor("changed", bucket).logical_or_(ctx.tensor("sums", bucket) != sums)


@torch.no_grad()
def record_local_step(ctx: Context, interval: int) -> None:
    """After the optimizers' steps: add up momenta, and what the weights have moved for a gradient of one.

    May be called again for the same step.
    """
    held, made = adam_slots_of(ctx), ctx.step % interval + 1
    for bucket in ctx.buckets:
        counts, taken, sizes = (ctx.tensor(name, bucket).tolist() for name in ("counts", "taken", "size"))
        skips = ctx.tensor("skips", bucket)
        early, late, expected = skips.tolist()
        for i, (param, momenta, _) in enumerate(_parts(ctx, bucket)):
            slot = held.get(param)
            if slot is None or slot.step == counts[i]:
                if not 0 <= taken[i] < made - early[i] - late[i]:
                    continue
                if taken[i] > 1:
                    late[i] += 1
                    continue
                if slot is not None:
                    _expect_fewer(slot, momenta, taken[i], interval - expected[i] - early[i])
                early[i] += 1
                continue
            taken[i] = taken[i] + 1 if slot.step == counts[i] + 1 else _SPOILED
            counts[i] = slot.step
            if taken[i] > 0:
                beta1 = slot.group["betas"][0]
                momenta.add_(slot.state["exp_avg"])
                sizes[i] += float(slot.group["lr"]) * (1 - beta1 ** taken[i]) / (1 - beta1 ** counts[i])
        for name, values in (("counts", counts), ("taken", taken), ("size", sizes)):
            own = ctx.tensor(name, bucket)
            own.copy_(torch.tensor(values, dtype=own.dtype, device="cpu"))
        skips.copy_(torch.tensor([early, late, expected], dtype=torch.int64, device="cpu"))
        ctx.tensor("sums", bucket).copy_(sums_of_bits(bucket, _trained(ctx, bucket)))


def _expect_fewer(slot: Slot, momenta: Tensor, taken: int, steps: int) -> None:
    """One step fewer than `steps` will be made of a parameter in the round, and at most one has been.

    Less remains of the first momentum then. After a second step it is not known any more.
    """
    beta1 = slot.group["betas"][0]
    if not taken:
        torch.mul(slot.state["exp_avg"], -_remaining(beta1, steps - 1), out=momenta)
    elif remaining := _remaining(beta1, steps):
        # The sum is m_1 less `remaining` m_0.
        momenta.lerp_(slot.state["exp_avg"], beta1**steps / remaining)


def launch_round_votes(ctx: Context, interval: int) -> None:
    """With the averages: tell the others how many steps of each parameter this rank has made, and the rows in use."""
    size = ctx.groups.world.size
    if size == 1:
        return
    held, flags, rows = adam_slots_of(ctx), list[list[float]](), list[list[Tensor]]()
    for bucket in ctx.buckets:
        steps = _steps_of_round(ctx, bucket, interval, held)
        flags.append([_vote(each, interval, size) for each in steps])
        least = _least_steps(ctx)
        if any(0 < each < least for each in ctx.tensor("taken", bucket).tolist()):
            ctx.notice(
                f"mean_moments: with fewer than {_BITS_OF_FEW_STEPS} bits, moments are set only in rounds in which a "
                f"parameter makes all {interval} steps; some make fewer, as where optimizers take turns"
            )
        parts = zip(_parts(ctx, bucket), steps, strict=True)
        rows.append([_used_rows(held.get(param), second, made) for (param, _, second), made in parts])
    launch_votes(ctx, flags, rows)


def _steps_of_round(ctx: Context, bucket: Bucket, interval: int, held: Mapping[nn.Parameter, Slot]) -> list[int]:
    """Steps that this rank has made of each parameter; 0 too if they do not tell its gradients."""
    least = _least_steps(ctx)
    counts, taken = (ctx.tensor(name, bucket).tolist() for name in ("counts", "taken"))
    known = zip(_trained(ctx, bucket), counts, taken, *ctx.tensor("skips", bucket).tolist(), strict=True)
    return [
        steps
        if steps >= least
        and steps + early + late == interval
        and late == expected
        and param in held
        and held[param].step == count
        else 0
        for param, count, steps, early, late, expected in known
    ]


def _least_steps(ctx: Context) -> int:
    """Of a parameter, whose moments are to be set."""
    return ctx.keep("least steps", lambda: 1)


def _vote(steps: int, interval: int, size: int) -> float:
    """A number of which the sum over all ranks is `size` times it only if all ranks made as many steps.

    The digits of the sum with base R + 1 are numbers of ranks. Sums are exact in fp32. With so many ranks that they
    would not be, the vote is 0, as without a step: 256 and more for one step of three.
    """
    vote = (size + 1) ** (interval - steps) if steps else 0
    return float(vote) if size * vote < _EXACT else 0.0


def _used_rows(slot: Slot | None, second: Tensor, steps: int) -> Tensor:
    """Which rows of a parameter had a gradient in the round: their second moments have not only decayed.

    Most rows show it in their first element.

    Shapes: second: of the parameter, at the start of the round; result: [K] bool for K rows.
    """
    before_KM = as_rows(second)
    if slot is None or not second.numel():
        return torch.ones(len(before_KM), dtype=torch.bool, device=second.device)
    after_KM, beta2 = as_rows(slot.state["exp_avg_sq"]), slot.group["betas"][1]
    if second.device.type != "cpu":  # a question of the host would wait
        return _grown(before_KM, after_KM, beta2, steps)
    used = _grown(before_KM[:, :1], after_KM[:, :1], beta2, steps)
    if used.all():
        return used
    lines = max(1, _BLOCK // before_KM.shape[1])
    for mine, before, after in zip(*(each.split(lines) for each in (used, before_KM, after_KM)), strict=True):
        if not mine.all():
            grown = torch.sub(after, before, alpha=beta2**steps * (1 + 1e-6))  # by more than rounding
            mine.logical_or_(grown.amax(1) > 0)
    return used


def _grown(before: Tensor, after: Tensor, beta2: float, steps: int) -> Tensor:
    for _ in range(steps):
        before = before * beta2  # as the optimizer does it, for the same bits
    return (before != after).any(1)


@torch.no_grad()
def infer_round(ctx: Context, bucket: Bucket, interval: int, mean: Tensor) -> None:
    """Set the moments to those of the mean gradients, before `mean` replaces the weights x_r of this rank.

    All ranks began the round at the same weights, with about the same moments m_0 and v_0. In H steps with the rates
    l_j, a gradient of step k moves the weights by (1 - b1^(H-k+1)) of it, times l / D. With G_r the average, weighted
    so, of the rank's own gradients, and G that of the mean gradients,

        sum_k (1 - b1^k) G_r = sum_j m_j - (b1 + ... + b1^H) m_0
        G = G_r + D (x_r - mean) / S,    S = sum_j l_j (1 - b1^j)
        m = m_r + (1 - b1^H) (G - G_r)

    G^2 has the square of the true gradient, and K / R of the variance of a rank's gradients, K = sum w^2 / (sum w)^2
    of these weights w. n, what the rank's own squares have added to v, has both in full. Mean gradients would have
    added the first and 1/R of the second, which is

        v = b2^H v_0 + (1 - b2^H) (G^2 + (n - G^2) (1 - K) / (R - K))

    For H = 1 this is exact. Rows of a parameter for which k ranks only had gradients in the round, this one among them,
    as words that are in few batches, have k in place of R: there

        v = b2^H v_0 + (1 - b2^H) (k/R)^2 (G'^2 + (n - G'^2) (1 - K) / (k - K)),    G' = G R / k

    of which n / R^2 is left for k = 1. Where optimizers take turns, H is the number of steps that a parameter has made
    in the round. The moments stay as they are where ranks made different numbers of them (`launch_round_votes`), for a
    parameter that something else has changed, and where the weights are so large beside their steps that differences
    are mostly rounding.

    Shapes: mean: [N], of the ranks' weights.
    """
    size = ctx.groups.world.size
    if size == 1:
        return
    held, sizes = adam_slots_of(ctx), ctx.tensor("size", bucket).tolist()
    steps = _steps_of_round(ctx, bucket, interval, held)
    votes = votes_of(ctx, bucket, len(_trained(ctx, bucket)))
    of_all = [size * _vote(each, interval, size) for each in steps]
    same = votes == (of_all[0] if len(set(of_all)) == 1 else votes.new_tensor(of_all))
    unchanged = same & ~ctx.tensor("changed", bucket)  # stays on the device
    counted_K, own_K = row_counts_of(ctx, bucket)
    few_K = own_K & (counted_K < size)
    some, end = bool(few_K.any()), 0
    weights, means = (dict(zip(bucket.params, bucket.split(of), strict=True)) for of in (bucket.flat, mean))
    for i, (param, momenta, second) in enumerate(_parts(ctx, bucket)):
        begin, end = end, end + num_rows(param)
        slot = held.get(param)
        if slot is None or not of_all[i] or not sizes[i] or not param.numel():
            continue
        formulas = _Formulas.of(slot, sizes[i], steps[i], size, torch.finfo(param.dtype).eps)
        m, v = slot.state["exp_avg"], slot.state["exp_avg_sq"]
        tensors = (v, momenta, second, weights[param], means[param])
        at = few_K[begin:end].nonzero()[:, 0] if some else few_K[:0]
        rows = [_rows_at(each, at) for each in tensors] if len(at) else None  # before they are overwritten
        formulas.apply((m, *tensors), unchanged[i], backends.kernels(m.device).infer_round)
        if rows is not None:
            exact = (rows[3].abs() <= formulas.largest).logical_and_(unchanged[i]) & (
                rows[0] * formulas.scale < math.inf
            )
            of_few = formulas.second_of_few(rows, counted_K[begin:end][at])
            put = torch.where(exact, of_few, _rows_at(v, at))
            if v.dim() > 1:
                v[at] = put.view(-1, *v.shape[1:])
            else:
                v.copy_(put.view(v.shape))


class _Formulas(NamedTuple):
    """The formulas of `infer_round` with the numbers of one parameter.

    Attributes:
        scale, shift: D / S is the root of `scale` v, plus `shift`.
        whole: sum of the weights w.
        share: 1 - b1^H.
        kept: b2^H.
        mix: the weight of n beside that of G^2.
        spread, size: K and R.
        largest: weights of which the differences are not mostly rounding.
    """

    scale: float
    shift: float
    whole: float
    share: float
    kept: float
    mix: float
    spread: float
    size: int
    largest: float

    @classmethod
    def of(cls, slot: Slot, moved: float, steps: int, size: int, eps: float) -> _Formulas:
        """Those after `steps` steps of a parameter in which a gradient of one moved the weights by `moved` / D."""
        beta1, beta2 = slot.group["betas"]
        shares = [1 - beta1**k for k in range(1, steps + 1)]
        whole = sum(shares)
        spread = sum(share**2 for share in shares) / whole**2
        return cls(
            scale=1 / (1 - beta2**slot.step) / moved**2,
            shift=slot.group["eps"] / moved,
            whole=whole,
            share=shares[-1],
            kept=beta2**steps,
            mix=(1 - spread) / (size - spread),
            spread=spread,
            size=size,
            largest=moved * _ERROR / eps,
        )

    def second_of_few(self, rows: Sequence[Tensor], counts_K: Tensor) -> Tensor:
        """v of rows that some ranks only had gradients for, this one among them: [K, M].

        Args:
            rows: [K, M] of v, of the sum of the momenta, of the second moment at the start, of weights and their mean.
            counts_K: [K] k, the ranks that had.
        """
        v, momenta, second, x, mean = rows
        k = counts_K[:, None].to(v.dtype)
        of_users = v.mul(self.scale).sqrt_().add_(self.shift).mul_(x - mean).add_(momenta, alpha=1 / self.whole)
        squares = of_users.mul_(self.size / k).square_()
        added = (v - self.kept * second).div_(1 - self.kept)
        mix = torch.where(k > 1.5, (1 - self.spread) / (k - self.spread), 1.0)  # of a single one the own squares
        squares.lerp_(added, mix).mul_((k / self.size) ** 2).clamp_(min=0)
        return second.mul(self.kept).add_(squares, alpha=1 - self.kept)

    def apply(
        self,
        tensors: tuple[Tensor, ...],
        unchanged: Tensor,
        kernel: Callable[[Sequence[Tensor], Sequence[float]], None] | None,
    ) -> None:
        """Set m and v; the second moment at the start of the round is used up.

        Args:
            tensors: m, v, the sum of the momenta, that second moment, the weights and their mean.
            unchanged: whether only the optimizer has changed the parameter, and on all ranks.
            kernel: compiled code for dense fp32 tensors.
        """
        if kernel is not None and all(each.dtype is torch.float32 and each.is_contiguous() for each in tensors):
            if unchanged:
                new = 1 - self.mix
                own = self.kept * new, self.mix, (1 - self.kept) * new
                kernel(tensors, (self.scale, self.shift, 1 / self.whole, self.share, *own, self.largest))
            return
        for block in in_blocks(*tensors):
            self.apply_torch(block, unchanged)

    def apply_torch(self, tensors: tuple[Tensor, ...], unchanged: Tensor) -> None:
        """As `apply`, in torch's operations."""
        m, v, momenta, second, x, mean = tensors
        root = v.mul(self.scale).sqrt_()
        finite = root < math.inf  # a v that has overflowed makes no steps, and says nothing of others' steps
        apart = root.add_(self.shift).mul_(x - mean)
        of_all = torch.add(apart, momenta, alpha=1 / self.whole)
        second.mul_(self.kept).lerp_(v, self.mix)
        second.addcmul_(of_all, of_all, value=(1 - self.kept) * (1 - self.mix))
        # Mostly; `where` is slow there.
        if x.device.type == "cpu" and x.abs().max() <= self.largest and unchanged and finite.all():
            v.copy_(second)
            m.add_(apart, alpha=self.share)
            return
        exact = (x.abs() <= self.largest).logical_and_(unchanged) & finite
        v.copy_(torch.where(exact, second, v))
        m.copy_(torch.where(exact, torch.add(m, apart, alpha=self.share), m))


def _rows_at(tensor: Tensor, at: Tensor) -> Tensor:
    """[K, M]: rows of a tensor; of one with fewer than two dimensions all of it."""
    return as_rows(tensor[at] if tensor.dim() > 1 else tensor)


def in_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors, which are alike; on a CPU in blocks that stay in the cache from one formula to the next."""
    first = tensors[0]
    if first.device.type != "cpu" or first.numel() <= _BLOCK or not all(each.is_contiguous() for each in tensors):
        return iter([tensors])
    return zip(*(each.view(-1).split(_BLOCK) for each in tensors), strict=True)


def _trained(ctx: Context, bucket: Bucket) -> list[nn.Parameter]:
    """The parameters of the bucket that Adam or AdamW of torch trains, as of `set_up_rounds`.

    One that Adam takes over later keeps the moments of its own rank.
    """

    def find() -> list[nn.Parameter]:
        trained = adam_params_of(ctx)
        return [param for param in bucket.params if param in trained]

    return ctx.keep(f"trained_{bucket.index}", find)


def _parts(ctx: Context, bucket: Bucket) -> list[tuple[nn.Parameter, Tensor, Tensor]]:
    """The parameters that Adam trains, each with the sum of its momenta and the second moment of the round's start."""
    params = _trained(ctx, bucket)
    momenta, seconds = (bucket.split(ctx.tensor(name, bucket), params) for name in ("momenta", "second"))
    return list(zip(params, momenta, seconds, strict=True))

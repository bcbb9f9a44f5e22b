"""Adam's moments after a round of local steps: those of mean gradients, as the average of the weights shows them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bagua.algorithms.base import Bucket, Context
from bagua.algorithms.mean_moments import Slot, slots_of, sums_of_bits
from bagua.codecs import Codec

__all__ = [
    "begin_round",
    "infer_round",
    "look_for_changes",
    "record_local_step",
    "set_up_rounds",
    "shows_mean_steps",
]

# Of D: what the gradient of a round may be off by, because weights are rounded.
_ERROR = 0.2
_LONGEST, _BITS = 4, 3
_SPOILED = -(1 << 40)  # steps taken in a round from which nothing is inferred


def shows_mean_steps(interval: int, codec: Codec) -> bool:
    """Whether averages show the mean gradients well enough for a default: after few steps, and with little noise."""
    many = 1 << 20
    return interval <= _LONGEST and 8 * codec.wire_bytes(many) >= _BITS * many


def set_up_rounds(ctx: Context, interval: int) -> None:
    """Begin a round from the moments that the optimizers hold.

    Args:
        ctx: of the algorithm, in `setup`.
        interval: H, local steps of a round.
    """
    for bucket in ctx.buckets:
        for name in ("momenta", "second"):
            ctx.tensor(name, bucket).zero_()
        for name, kind in (("size", torch.float64), ("counts", torch.int64), ("taken", torch.int64)):
            ctx.tensor(name, bucket, torch.zeros(len(bucket.params), dtype=kind)).zero_()
        ctx.tensor("sums", bucket, sums_of_bits(bucket))
        ctx.tensor("changed", bucket, torch.zeros(len(bucket.params), dtype=torch.bool, device=bucket.flat.device))
        begin_round(ctx, bucket, interval)


@torch.no_grad()
def begin_round(ctx: Context, bucket: Bucket, interval: int) -> None:
    """After weights and moments were set: no local step has been made since."""
    held, counts = slots_of(ctx), ctx.tensor("counts", bucket)
    now: list[int] = []
    for param, momenta, second in _parts(ctx, bucket):
        slot = held.get(param)
        now.append(0 if slot is None else slot.step)
        if slot is None:
            continue
        beta1 = slot.group["betas"][0]
        # What the sum of the momenta holds of the first one: less of it remains in each.
        torch.mul(slot.state["exp_avg"], -sum(beta1**k for k in range(1, interval + 1)), out=momenta)
        second.copy_(slot.state["exp_avg_sq"])
    counts.copy_(torch.tensor(now, dtype=torch.int64))
    for name in ("size", "taken", "changed"):
        ctx.tensor(name, bucket).zero_()
    ctx.tensor("sums", bucket).copy_(sums_of_bits(bucket))


def look_for_changes(ctx: Context) -> None:
    """Before the optimizers' steps: note parameters that something else has changed, as a clamp or a mask."""
    for bucket in ctx.buckets:
        ctx.tensor("changed", bucket).logical_or_(ctx.tensor("sums", bucket) != sums_of_bits(bucket))


@torch.no_grad()
def record_local_step(ctx: Context) -> None:
    """After the optimizers' steps: add up momenta, and what the weights have moved for a gradient of one.

    May be called again for the same step.
    """
    held = slots_of(ctx)
    for bucket in ctx.buckets:
        counts, taken, sizes = (ctx.tensor(name, bucket).tolist() for name in ("counts", "taken", "size"))
        for i, (param, momenta, _) in enumerate(_parts(ctx, bucket)):
            slot = held.get(param)
            if slot is None or slot.step == counts[i]:
                continue
            taken[i] = taken[i] + 1 if slot.step == counts[i] + 1 else _SPOILED
            counts[i] = slot.step
            if taken[i] > 0:
                beta1 = slot.group["betas"][0]
                momenta.add_(slot.state["exp_avg"])
                sizes[i] += float(slot.group["lr"]) * (1 - beta1 ** taken[i]) / (1 - beta1 ** counts[i])
        for name, values in (("counts", counts), ("taken", taken), ("size", sizes)):
            own = ctx.tensor(name, bucket)
            own.copy_(torch.tensor(values, dtype=own.dtype))
        ctx.tensor("sums", bucket).copy_(sums_of_bits(bucket))


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

    For H = 1 this is exact. The moments stay as they are where this rank made more or fewer steps in the round, for a
    parameter that something else has changed, and where the weights are so large beside their steps that differences
    are mostly rounding.

    Shapes: mean: [N], of the ranks' weights.
    """
    size = ctx.groups.world.size
    if size == 1:
        return
    held = slots_of(ctx)
    counts, taken, sizes = (ctx.tensor(name, bucket).tolist() for name in ("counts", "taken", "size"))
    changed = ctx.tensor("changed", bucket)  # stays on the device
    weights, means = bucket.split(bucket.flat), bucket.split(mean)
    for i, (param, momenta, second) in enumerate(_parts(ctx, bucket)):
        slot = held.get(param)
        if slot is None or taken[i] != interval or slot.step != counts[i] or not sizes[i]:
            continue
        x = weights[i]
        exact = (x.abs() <= sizes[i] * _ERROR / torch.finfo(x.dtype).eps) & ~changed[i]
        _infer(slot, momenta, second, (x - means[i]) / sizes[i], exact, interval, size)


def _infer(slot: Slot, momenta: Tensor, second: Tensor, apart: Tensor, exact: Tensor, interval: int, size: int) -> None:
    """The formulas of one parameter; `apart` is (x_r - mean) / S."""
    m, v = slot.state["exp_avg"], slot.state["exp_avg_sq"]
    beta1, beta2 = slot.group["betas"]
    shares = [1 - beta1**k for k in range(1, interval + 1)]
    kept, whole = beta2**interval, sum(shares)
    spread = sum(share**2 for share in shares) / whole**2
    divisor = v.div(1 - beta2**slot.step).sqrt_().add_(slot.group["eps"])
    apart = divisor.mul_(apart)
    squared = apart.add(momenta, alpha=1 / whole).square_()
    own = second.mul(kept)
    added = v.sub(own).div_(1 - kept).clamp_min_(0)
    squared.lerp_(added, (1 - spread) / (size - spread))
    v.copy_(torch.where(exact, own.add_(squared, alpha=1 - kept), v))
    m.copy_(torch.where(exact, torch.add(m, apart, alpha=shares[-1]), m))


def _parts(ctx: Context, bucket: Bucket) -> list[tuple[nn.Parameter, Tensor, Tensor]]:
    """The parameters, each with the sum of its momenta and the second moment with which the round began."""
    momenta, seconds = (bucket.split(ctx.tensor(name, bucket)) for name in ("momenta", "second"))
    return list(zip(bucket.params, momenta, seconds, strict=True))

"""Adam's moments in gossip over all ranks: those of the mean gradient, as the average of the weights shows it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bagua.algorithms.base import Bucket, Context
from bagua.algorithms.step_votes import launch_votes, votes_of

# Of D l: what an inferred step may be off by, because weights are rounded. Its gradient may be off by 10 times that.
_ERROR = 0.02

__all__ = [
    "Slot",
    "adam_params_of",
    "adam_slots_of",
    "adams",
    "check_mean_moments",
    "forget_steps",
    "infer_moments",
    "launch_step_votes",
    "record_steps",
    "set_up_mean_moments",
    "slots_of",
    "sum_of_bits",
    "sums_of_bits",
]

_BITS = {2: torch.int16, 4: torch.int32}


class Slot(NamedTuple):
    """State and options of a parameter's Adam."""

    state: dict[str, Any]
    group: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps made."""
        return int(self.state["step"])


def adams(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Those that are Adam or AdamW of torch."""
    return [each for each in optimizers if isinstance(each, torch.optim.Adam | torch.optim.AdamW)]


def check_mean_moments(
    params: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    option: str = "mean_moments",
    *,
    others: bool = False,
) -> None:
    """Check that the weights move as Adam moves them, and that their differences are exact enough.

    Args:
        option: that asks for it, for messages.
        others: other optimizers may be there beside Adam; their parameters are left alone.

    Raises:
        ValueError: an optimizer is neither Adam nor AdamW, or all are others, or one is AMSGrad, or a parameter has 16
            bits.
    """
    kinds, found = [type(optimizer).__name__ for optimizer in optimizers] or ["none"], adams(optimizers)
    if not found or (len(found) < len(optimizers) and not others):
        raise ValueError(f"{option}: needs torch.optim.Adam or AdamW, got {', '.join(kinds)}")
    if any(group["amsgrad"] for optimizer in found for group in optimizer.param_groups):
        raise ValueError(f"{option}: amsgrad keeps the largest second moment, which cannot be corrected")
    short = next((name for name, param in params.items() if param.element_size() < 4), None)
    if short is not None:
        raise ValueError(
            f"{option}: the steps of {short!r}, a parameter of 16 bits, are rounded too coarsely to infer moments"
        )


def set_up_mean_moments(ctx: Context) -> None:
    """Take what the optimizers hold as moments of the mean gradient; no step was made from there."""
    held = slots_of(ctx)
    for bucket in ctx.buckets:
        for name in ("first", "second"):
            ctx.tensor(name, bucket).zero_()
        for name, kind in (("size", torch.float64), ("counts", torch.int64)):
            ctx.tensor(name, bucket, torch.zeros(len(bucket.params), dtype=kind, device="cpu")).zero_()
        sums = sums_of_bits(bucket)
        ctx.tensor("sums", bucket, sums).copy_(sums)
        for param, first, second in _parts(ctx, bucket):
            if param in held:
                first.copy_(held[param].state["exp_avg"])
                second.copy_(held[param].state["exp_avg_sq"])


def record_steps(ctx: Context) -> None:
    """After the optimizers' steps: keep l of each parameter, before a scheduler changes it, and a sum of its bits."""
    held = slots_of(ctx)
    for bucket in ctx.buckets:
        before = ctx.tensor("counts", bucket).tolist()
        counts = [held[param].step if param in held else 0 for param in bucket.params]
        sizes = [
            float(held[param].group["lr"]) / (1 - held[param].group["betas"][0] ** now) if now == old + 1 else 0.0
            for param, now, old in zip(bucket.params, counts, before, strict=True)
        ]
        ctx.tensor("counts", bucket).copy_(torch.tensor(counts, dtype=torch.int64, device="cpu"))
        ctx.tensor("size", bucket).copy_(torch.tensor(sizes, dtype=torch.float64, device="cpu"))
        ctx.tensor("sums", bucket).copy_(sums_of_bits(bucket))


def forget_steps(ctx: Context) -> None:
    """Infer nothing from the next average: weights are changed by something else before it."""
    for bucket in ctx.buckets:
        sizes = ctx.tensor("size", bucket)
        for (_, first, _), size in zip(_parts(ctx, bucket), sizes.tolist(), strict=True):
            if size:  # a step was made whose momentum no average shows
                first.fill_(torch.nan)
        sizes.zero_()


def launch_step_votes(ctx: Context) -> None:
    """With the averages: tell the other ranks which parameters have made just one step since the last one."""
    if ctx.groups.world.size == 1:
        return
    held, flags = slots_of(ctx), list[list[bool]]()
    for bucket in ctx.buckets:
        counts, sizes = (ctx.tensor(name, bucket).tolist() for name in ("counts", "size"))
        known = zip(bucket.params, counts, sizes, strict=True)
        flags.append([bool(size) and param in held and held[param].step == count for param, count, size in known])
    launch_votes(ctx, flags)


@torch.no_grad()
def infer_moments(ctx: Context, bucket: Bucket, mixed: Tensor) -> None:
    """Set the moments to those of the mean gradient, before `mixed` replaces the weights x_r of this rank.

    All ranks stepped from the same weights y, x_r = s y - l m_r / D_r with the decoupled weight decay in s. The D_r are
    about equal, so the mean momentum M, the mean gradient g and the second moment v are

        M = m_r + D_r (x_r - mixed) / l,    g = (M - b1 M_before) / (1 - b1),    v = b2 v_before + (1 - b2) g^2

    D is that of the step, `before` what was set a step earlier. Where a rank made no step, or not just one, from the
    weights of the average before (`launch_step_votes`), all ranks keep their own moments: what a rank that made none
    has not moved would be taken for a large gradient. So they do for a parameter that has changed since the optimizer's
    step, as by a clamp or a mask, and for elements whose weights are too large beside their steps, as at
    the start of a learning rate's warm-up: there the differences are mostly rounding. An M that is not known is kept
    as NaN.

    Shapes: mixed: [N], the mean of the ranks' weights.
    """
    if ctx.groups.world.size == 1:
        return
    held, counts, sizes = slots_of(ctx), ctx.tensor("counts", bucket).tolist(), ctx.tensor("size", bucket)
    weights, means = bucket.split(bucket.flat), bucket.split(mixed)
    votes = votes_of(ctx, bucket, len(bucket.params))  # what follows from them stays on the device
    all_did, none_did = votes > ctx.groups.world.size - 0.5, votes < 0.5
    same = all_did & (ctx.tensor("sums", bucket) == sums_of_bits(bucket))
    for (param, first, second), x, mean, count, size, untouched, at_rest in zip(
        _parts(ctx, bucket), weights, means, counts, sizes.tolist(), same, none_did, strict=True
    ):
        if param not in held:
            continue
        slot, (beta1, beta2) = held[param], held[param].group["betas"]
        m, v = slot.state["exp_avg"], slot.state["exp_avg_sq"]
        if size and slot.step == count:
            exact = untouched & (x.abs() <= size * _ERROR / torch.finfo(x.dtype).eps)
            divisor = v.div(1 - beta2**count).sqrt_().add_(slot.group["eps"])
            exact &= divisor < math.inf  # a v that has overflowed makes no step, and says nothing of others' steps
            mean_m = torch.addcmul(m, divisor, x - mean, value=1 / size)
            gradient = mean_m.sub(first, alpha=beta1).div_(1 - beta1)
            mean_v = second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            v.copy_(torch.where(exact & first.isfinite(), mean_v, v))
            m.copy_(torch.where(exact, mean_m, m))
            first.copy_(torch.where(exact, mean_m, torch.nan))
        else:
            first.copy_(torch.where(at_rest, m, torch.nan))
        second.copy_(v)
    sizes.zero_()


def sums_of_bits(bucket: Bucket, only: Collection[nn.Parameter] | None = None) -> Tensor:
    """Of each parameter the sum of its bits, as integers that wrap: whether it is still what the optimizer made it.

    Args:
        bucket: of weights.
        only: these parameters of the bucket; None: all.

    Shapes: result: [P] int64, on the device of the bucket.
    """
    wanted = None if only is None else set(only)
    parts, start = [], 0
    for param in bucket.params:  # as they lie: a parameter in channels_last has no flat view
        if wanted is None or param in wanted:
            parts.append(sum_of_bits(bucket.flat[start : start + param.numel()]))
        start += param.numel()
    return torch.stack(parts) if parts else torch.zeros(0, dtype=torch.int64, device=bucket.flat.device)


def sum_of_bits(x_N: Tensor) -> Tensor:
    """The sum of the bits of a contiguous tensor of 16-bit, 32-bit or 64-bit numbers, as integers that wrap."""
    # In words of 64 bits: sums of 32-bit integers take 25 times as long on a CPU.
    if x_N.element_size() == 8:
        return x_N.view(torch.int64).sum()
    own, fit = _BITS[x_N.element_size()], 8 // x_N.element_size()
    begin = -int(x_N.storage_offset()) % fit
    words = (x_N.numel() - begin) // fit
    if words < 1:
        return x_N.view(own).sum(dtype=torch.int64)
    end = begin + fit * words
    edges = [part.view(own).sum(dtype=torch.int64) for part in (x_N[:begin], x_N[end:]) if part.numel()]
    return sum(edges, x_N[begin:end].view(torch.int64).sum())


def _parts(ctx: Context, bucket: Bucket) -> list[tuple[nn.Parameter, Tensor, Tensor]]:
    """The parameters, each with its first and second moment after the last average."""
    firsts, seconds = (bucket.split(ctx.tensor(name, bucket)) for name in ("first", "second"))
    return list(zip(bucket.params, firsts, seconds, strict=True))


def slots_of(ctx: Context) -> dict[nn.Parameter, Slot]:
    """Of the parameters that have state."""
    return _slots_of(ctx.optimizers)


def adam_slots_of(ctx: Context) -> dict[nn.Parameter, Slot]:
    """Of the parameters that have state and that Adam or AdamW of torch trains."""
    return _slots_of(adams(ctx.optimizers))


def adam_params_of(ctx: Context) -> set[nn.Parameter]:
    """All parameters that Adam or AdamW of torch trains, with or without state."""
    groups = (group for optimizer in adams(ctx.optimizers) for group in optimizer.param_groups)
    return {param for group in groups for param in group["params"]}


def _slots_of(optimizers: Sequence[torch.optim.Optimizer]) -> dict[nn.Parameter, Slot]:
    return {
        param: Slot(optimizer.state[param], group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
        if "exp_avg" in optimizer.state.get(param, {})
    }

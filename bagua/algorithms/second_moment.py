"""The second moment of Adam in algorithms that take local steps: as if the gradients had been averaged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bagua.algorithms.base import Context
from bagua.algorithms.mean_moments import Slot, adams, slots_of

__all__ = [
    "check_scalable",
    "corrects_moments",
    "fit_mean_moments",
    "fit_scaling",
    "fits_adam",
    "rescale_second_moments",
    "set_up_second_moments",
    "steps_of",
    "told_of_mean_moments",
]

_WIDE = (torch.float32, torch.float64)
EVERY = 8  # training steps between two corrections; the momentum of Adam reaches back about as far


def check_scalable(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Check that an optimizer has Adam's second moment.

    Raises:
        ValueError: none has, or one keeps the largest second moment (AMSGrad), which cannot be corrected.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(group.get("amsgrad") for group in groups):
        raise ValueError("scale_second_moment: amsgrad keeps the largest second moment, which cannot be corrected")
    if not any("betas" in group for group in groups):
        given = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        raise ValueError(f"scale_second_moment: needs an optimizer with Adam's second moment, got {given}")


def fit_scaling(wanted: bool | None, ctx: Context, name: str) -> bool:
    """Resolve `scale_second_moment`, once: None becomes true where `corrects_moments`.

    Args:
        wanted: the option.
        ctx: of the algorithm, in `setup` or later.
        name: of the algorithm, for the notice.
    """
    told = f"{name}: second moments of Adam are scaled to those of mean gradients (scale_second_moment)"
    return ctx.keep("scales", lambda: _fit(wanted, ctx, told))


def fit_mean_moments(wanted: bool | None, ctx: Context, name: str, *, others: bool = False) -> bool:
    """Resolve `mean_moments`, once, as `fit_scaling` does.

    Args:
        wanted: the option, False where an average does not show the mean step.
        ctx: of the algorithm, in `setup` or later.
        name: of the algorithm, for the notice.
        others: other optimizers may be there beside Adam.
    """
    return ctx.keep("means", lambda: _fit(wanted, ctx, told_of_mean_moments(name), others))


def told_of_mean_moments(name: str) -> str:
    """Return the notice of an algorithm that does it."""
    return f"{name}: moments of Adam are set to those of mean gradients (mean_moments)"


def corrects_moments(ctx: Context, *, others: bool = False) -> bool:
    """Whether moments are corrected by default: several ranks, and Adam or AdamW of torch makes the steps.

    Not with amsgrad, and not for weights of 16 bits, whose moments are too coarse to tell what was added.

    Args:
        others: other optimizers may be there beside Adam.
    """
    wide = all(bucket.flat.dtype in _WIDE for bucket in ctx.buckets)
    return ctx.groups.size > 1 and wide and fits_adam(ctx.optimizers, others=others)


def fits_adam(optimizers: Sequence[torch.optim.Optimizer], *, others: bool = False) -> bool:
    """Whether there are optimizers, and each is Adam or AdamW of torch, without amsgrad, with wide weights.

    Args:
        others: as in `corrects_moments`.
    """
    found = adams(optimizers)
    groups = [group for each in found for group in each.param_groups]
    if not groups or (len(found) < len(optimizers) and not others) or any(group["amsgrad"] for group in groups):
        return False
    return all(param.dtype in _WIDE for group in groups for param in group["params"])


def _fit(wanted: bool | None, ctx: Context, told: str, others: bool = False) -> bool:
    if wanted is not None or not corrects_moments(ctx, others=others):
        return bool(wanted)
    ctx.notice(told)
    return True


def set_up_second_moments(ctx: Context) -> None:
    """Take what the optimizers hold as second moments of the mean gradient: after a warm-up that is what it is."""
    held = _slots(ctx)
    for bucket in ctx.buckets:
        seconds = bucket.split(ctx.tensor("second_moment", bucket).zero_())
        steps = ctx.tensor("adam_steps", bucket, torch.zeros(len(bucket.params), dtype=torch.int64, device="cpu"))
        steps.copy_(torch.tensor(steps_of(held, bucket.params), dtype=torch.int64, device="cpu"))
        for param, second in zip(bucket.params, seconds, strict=True):
            if param in held:
                second.copy_(held[param].state["exp_avg_sq"])


@torch.no_grad()
def rescale_second_moments(ctx: Context) -> None:
    """Every `EVERY` steps, correct what the local gradients have added to v since; nothing is exchanged.

    With R ranks, v_0 the corrected v of k steps ago, n = v - b2^k v_0 and the momentum m of this rank:

        v = b2^k v_0 + n / R + (1 - 1/R) min((1 - b2^k) m^2, n)

    n is what squares of local gradients have added. These are the square of the true gradient and the variance of a
    small batch; the mean gradient has 1/R of that variance. m stands for the true gradient. k is counted for each
    parameter; where it is not in 1 to `EVERY` (state was loaded, or the parameter is not used), v is taken as it is.
    """
    size = ctx.groups.world.size
    if size == 1 or (ctx.step + 1) % EVERY:
        return
    held = _slots(ctx)
    for bucket in ctx.buckets:
        before, now = ctx.tensor("adam_steps", bucket), steps_of(held, bucket.params)
        seconds = bucket.split(ctx.tensor("second_moment", bucket))
        for param, old, begun, step in zip(bucket.params, seconds, before.tolist(), now, strict=True):
            if param not in held:
                continue
            state, beta2 = held[param].state, float(held[param].group["betas"][1])
            v: Tensor = state["exp_avg_sq"]
            if 0 < step - begun <= EVERY:
                kept = beta2 ** (step - begun)
                base = old * kept
                added = v.sub(base).clamp_min_(0)
                signal = state["exp_avg"].square().mul_(1 - kept)
                torch.minimum(signal, added, out=signal)
                mean = base.add_(added, alpha=1 / size).add_(signal, alpha=1 - 1 / size)
                v.copy_(torch.where(v < math.inf, mean, v))  # an inf less another would be NaN
            old.copy_(v)
        before.copy_(torch.tensor(now, dtype=torch.int64, device="cpu"))


def _slots(ctx: Context) -> dict[nn.Parameter, Slot]:
    """Of the parameters that have both of Adam's moments."""
    names = {"step", "exp_avg_sq"}
    held = slots_of(ctx).items()
    return {param: slot for param, slot in held if "betas" in slot.group and slot.state.keys() >= names}


def steps_of(held: Mapping[nn.Parameter, Slot], params: Sequence[nn.Parameter]) -> list[int]:
    """Steps of the parameters, 0 without state; one wait for the device instead of one per parameter."""
    none = torch.zeros((), dtype=torch.float64, device="cpu")
    found = [held[param].state["step"] if param in held else none for param in params]
    counts = [each if isinstance(each, Tensor) else torch.full_like(none, each) for each in found]
    devices = {each.device for each in counts}
    if len(devices) == 1:
        return [int(each) for each in torch.stack([each.reshape(()).double() for each in counts]).tolist()]
    return [int(each) for each in counts]

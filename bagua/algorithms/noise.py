"""The second moment of Adam where gradients come through `eden`: without the noise of the codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bagua.algorithms.base import Context
from bagua.algorithms.denoising import subtract_noise
from bagua.algorithms.nodes import num_encoding
from bagua.algorithms.second_moment import corrects_moments
from bagua.codecs import Codec, Eden
from bagua.codecs.kernels import Moments

__all__ = [
    "check_denoisable",
    "denoise_second_moments",
    "fit_denoising",
    "note_steps",
    "set_up_noise",
    "share_of_noise",
]

_FLOOR = 2.0  # times the square of the momentum; chosen on tasks of their own
# What the centroids leave of the variance of a normal distribution, for (bits, states): the nearest of 2, 4, 8 and 16
# (Lloyd-Max), and those of the best path through a trellis in blocks of 256.
_LEFT = {
    (1, 1): 0.36338,
    (2, 1): 0.1175,
    (3, 1): 0.03454,
    (4, 1): 0.009497,
    (1, 8): 0.3066,
    (1, 32): 0.2906,
    (2, 8): 0.0835,
}


def share_of_noise(codec: Eden, num: int, gather_codec: Codec | None = None) -> float:
    """Return the part of the square of a mean gradient that is noise, with `num` ranks that use the codec.

    `eden` is unbiased and multiplies the expected square of what it encodes by 1 / (1 - d), d being what its centroids
    leave of a normal distribution. Gradients of small batches are mostly noise of their own, independent on each rank.
    The squares of the ranks' gradients are then R times that of their mean, and so are the errors of the ranks, whose
    mean has 1/R of that: a factor of 1 / (1 - d). With more than two ranks the mean is encoded again: one more. So
    1 - (1 - d)^2 of the square is the codec's, and d with two ranks. If means have another codec, one factor is its
    own: 1 unless it is `eden`, as the noise of others is not known.

    Examples:
        >>> round(share_of_noise(bagua.codecs.Eden(bits=1), num=4), 2)
        0.59
    """
    kept = 1 - _LEFT[codec.bits, codec.states]
    made = codec if gather_codec is None else gather_codec
    if num > 2 and isinstance(made, Eden):
        kept *= 1 - _LEFT[made.bits, made.states]
    return 1 - kept


def check_denoisable(params: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Check that second moments are Adam's, and fine enough.

    Raises:
        ValueError: an optimizer is neither Adam nor AdamW, or is AMSGrad, or a parameter has 16 bits.
    """
    kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
    if not optimizers or not all(isinstance(each, torch.optim.Adam | torch.optim.AdamW) for each in optimizers):
        raise ValueError(f"denoise_second_moment: needs torch.optim.Adam or AdamW, got {kinds}")
    if any(group["amsgrad"] for optimizer in optimizers for group in optimizer.param_groups):
        raise ValueError("denoise_second_moment: amsgrad keeps the largest second moment, which cannot be corrected")
    short = next((name for name, param in params.items() if param.element_size() < 4), None)
    if short is not None:
        raise ValueError(f"denoise_second_moment: the second moments of {short!r}, of 16 bits, are too coarse")


def fit_denoising(
    wanted: bool | None, ctx: Context, codec: Codec, feedback: bool, hierarchical: bool, name: str
) -> bool:
    """Resolve `denoise_second_moment`, once: None becomes true for `eden` without feedback where `corrects_moments`.

    Args:
        wanted: the option.
        ctx: of the algorithm, in `setup` or later.
        codec: of the exchange.
        feedback: whether errors are fed back.
        hierarchical: whether only nodes use the codec.
        name: of the algorithm, for the notice.
    """

    def fit() -> bool:
        apart = num_encoding(ctx, hierarchical)
        if wanted is not None or not (isinstance(codec, Eden) and not feedback and corrects_moments(ctx)):
            return bool(wanted) and apart > 1
        if apart > 1:
            ctx.notice(f"{name}: the codec's noise is taken out of Adam's second moments (denoise_second_moment)")
        return apart > 1

    return ctx.keep("denoises", fit)


def set_up_noise(ctx: Context) -> None:
    """Start from no magnitudes, as the exchange does when it is prepared."""
    for bucket in ctx.buckets:
        ctx.tensor("noise_magnitude", bucket, torch.zeros_like(bucket.flat, dtype=torch.float32)).zero_()


def note_steps(ctx: Context) -> None:
    """Before the optimizers' steps: which parameters have made how many."""
    counted = ctx.keep("steps", dict[nn.Parameter, int])
    counted.clear()
    counted.update({param: int(state["step"]) for param, (state, _) in _slots(ctx).items()})


@torch.no_grad()
def denoise_second_moments(ctx: Context, share: float, scaled: bool) -> None:
    """After the optimizers' steps, take the expected square of the codec's noise out of what they have added to v.

    With the mean gradient g as it was decoded, the scale s of each element (1 without a running scale) and the mean
    over a window of 256 elements around it:

        n = share * s^2 * mean(g^2 / s^2),  v <- max(v - (1 - b2) n, min(v, f)),  f = 2 m^2 (1 - b2^k) / (1 - b1^k)^2

    `eden` spreads its error evenly over a block of g / s, so n is its expected square in element i. f keeps
    elements that are mostly noise from long steps: it is the second moment with which a step is 0.7 times as long as
    the learning rate. Windows stand for blocks, which begin elsewhere. n is 0 where g is exactly 0, as in rows that no
    rank uses, which are cleared (`idle_rows`).

    Every rank gets the same bits from the same g: sums are taken in a fixed order, and no operation is fused.

    Args:
        ctx: of the algorithm, in `on_step_end`; buckets hold g, or gradients that lie elsewhere do.
        share: of `share_of_noise`.
        scaled: whether the exchange has a running scale.
    """
    held, counted = _slots(ctx), ctx.keep("steps", dict[nn.Parameter, int])
    for bucket in ctx.buckets:
        g_N, moments = bucket.flat, list[Moments]()
        for param, part in zip(bucket.params, bucket.split(g_N), strict=True):
            if param not in held:
                continue
            state, group = held[param]
            step = int(state["step"])
            if step != counted.get(param, 0) + 1:
                continue  # it made no step, or several: what they have added is not known
            if param.grad is not None and param.grad.data_ptr() != part.data_ptr():
                part.copy_(param.grad)  # a tensor of its own is what the optimizer saw, clipped or scaled perhaps
            beta1, beta2 = map(float, group["betas"])
            floor = _FLOOR * (1 - beta2**step) / (1 - beta1**step) ** 2
            moments.append(Moments(state["exp_avg"], state["exp_avg_sq"], part, 1 - beta2, floor))
        subtract_noise(g_N, ctx.tensor("noise_magnitude", bucket) if scaled else None, share, moments)


def _slots(ctx: Context) -> dict[nn.Parameter, tuple[dict[str, Any], dict[str, Any]]]:
    """State and group of the parameters that have Adam's moments."""
    return {
        param: (optimizer.state[param], group)
        for optimizer in ctx.optimizers
        for group in optimizer.param_groups
        for param in group["params"]
        if {"step", "exp_avg", "exp_avg_sq"} <= optimizer.state.get(param, {}).keys()
    }

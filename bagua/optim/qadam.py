"""QAdam: Adam with a second moment that is fixed after a warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bagua.optim.blocked import Batch, batches, ranges
from bagua.optim.two_stage import bounded, decay_of, shrink, update_moments, with_decay, with_floor
from bagua.optim.warmed import WarmedUp, warming

__all__ = ["QAdam"]


class QAdam(WarmedUp):
    """Adam for `warmup_steps` steps; then the second moment v is fixed. Used with the algorithm "qadam".

        g  = gradient + weight_decay x              or, decoupled,  x *= 1 - lr weight_decay  at every step
        m  = b1 m + (1 - b1) g
        v  = b2 v + (1 - b2) g^2                                                        at steps k <= w
        x -= lr / (1 - b1^k) * m / (sqrt(v) / sqrt(1 - b2^j) + eps)    j updates of v so far, w = warmup_steps

    Steps are counted per parameter, as Adam counts them: a parameter that first gets a gradient late warms up
    late. During the warm-up the bits are those of `torch.optim.Adam(foreach=True)`, or of `torch.optim.AdamW` with
    decoupled weight decay; on CPU those of `foreach=False` too. Alone it works as well: Adam whose v is fixed at
    some step.

    Args:
        params: parameters or groups of them.
        lr: step size; any scheduler may change it.
        warmup_steps: steps with exact gradients, in which v is learned; the same for all groups. Papers take
            15 to 25 % of all steps; v must have settled, and so must the learning rate's own warm-up. "auto" ends it
            when v is stable, after more than 1 / (1 - b2) steps: see `bagua.optim.WarmedUp`.
        betas: decay of m and v.
        eps: added to the root of v.
        weight_decay: L2 regularisation, as `torch.optim.Adam` has it, unless decoupled.
        decoupled_weight_decay: weight decay shrinks the weights and stays out of the moments, as in
            `torch.optim.AdamW`. The ranks do so alike; nothing more is exchanged.
        variance_floor: when v is fixed, elements below this share of their tensor's mean are raised to it. Without,
            a weight that hardly had a gradient until then is thrown far away by its first ordinary one. Elements
            that are exactly 0 never had a gradient; they no longer move (their v becomes infinite). Once v is
            fixed, m divided by its divisor is bounded, too, by the larger of 10 and 1 / sqrt(variance_floor). A tensor
            whose gradients are only rounding errors, such as a bias before a batch norm, has a v near 0, and from a
            codec of 1 bit it gets an m as large as its neighbours'. 0 turns floor and bound off.

    Raises:
        ValueError: an argument is wrong; the message names it.

    Source: arXiv:2102.02888 (1-bit Adam), algorithm 1; Bagua 0.9's QAdamOptimizer; arXiv:1711.05101 (AdamW),
        algorithm 2.
    Differs: the paper and Bagua 0.9 let 1 - b2^k grow on although v no longer does, so that after a warm-up of
        100 steps with b2 = 0.999 the step size grows by 3.2; here it is fixed together with v. Neither has
        `variance_floor`. Bagua 0.9 reused an old m at the step in which the stages change, and left weight decay out
        of m afterwards.

    Examples:
        >>> optimizer = bagua.optim.QAdam(model.parameters(), lr=1e-3, warmup_steps=200)
        >>> model = bagua.distribute(model, optimizer, "qadam")
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        warmup_steps: int | str = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        variance_floor: float = 0.01,
        *,
        decoupled_weight_decay: bool = False,
    ) -> None:
        defaults = {"lr": lr, "warmup_steps": warmup_steps, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"variance_floor": variance_floor, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make one step; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin_step()
        for group in self.param_groups:
            live = self.live(group)
            warm = [one for one in live if warming(group, one[2])]
            fixed = [one for one in live if not warming(group, one[2])]
            for batch in batches(warm):
                for slot in batch[2]:
                    slot["num_updates"] += 1
                self._step_batch(group, batch, is_warm=True)
            for batch in batches(fixed):
                for slot in batch[2]:
                    if not slot.get("fixed"):
                        slot["exp_avg_sq"].copy_(with_floor(slot["exp_avg_sq"], group["variance_floor"]))
                        slot["fixed"] = True
                self._step_batch(group, batch, is_warm=False)
        self.end_step()
        return loss

    def _step_batch(self, group: dict[str, Any], batch: Batch, is_warm: bool) -> None:
        params, grads, slots = batch
        (beta1, beta2), (decay, left), lr = group["betas"], decay_of(group), float(group["lr"])
        corrections = [(1 - beta2 ** slot["num_updates"]) ** 0.5 for slot in slots]
        sizes = [(lr / (1 - beta1 ** slot["step"])) * -1 for slot in slots]
        columns = params, grads, [slot["exp_avg"] for slot in slots], [slot["exp_avg_sq"] for slot in slots]
        for weights, slopes, firsts, seconds in ranges(*columns):
            shrink(weights, left)
            total = with_decay(slopes, weights, decay)
            if is_warm:
                update_moments(total, firsts, seconds, (beta1, beta2))
            else:
                torch._foreach_lerp_(firsts, total, 1 - beta1)
            roots = torch._foreach_sqrt(seconds)
            torch._foreach_div_(roots, corrections)
            torch._foreach_add_(roots, group["eps"])
            divisors = roots if is_warm else bounded(list(roots), firsts, group["variance_floor"])
            torch._foreach_addcdiv_(weights, firsts, divisors, sizes)

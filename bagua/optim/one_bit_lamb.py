"""1-bit LAMB: LAMB on gradients that averaged momenta of few bits imply, or with scaling that is fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bagua.optim.blocked import Batch, Joined, batches, ranges
from bagua.optim.checks import check_flag, check_number
from bagua.optim.two_stage import bounded, update_moments, with_decay, with_floor
from bagua.optim.warmed import WarmedUp, end_of, warming

__all__ = ["OneBitLamb"]


class OneBitLamb(WarmedUp):
    """LAMB whose gradients come, after `warmup_steps` steps, from quantised momenta. For the algorithm "one_bit_lamb".

    Per parameter tensor ("layer"), with g the mean gradient; after the warm-up the one that the mean of the quantised
    momenta implies, (m - b1 m_before) / (1 - b1):

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  M = m / (1 - b1^k),  V = v / (1 - b2^k)
        p = M / (sqrt(V) + eps),  u = p + weight_decay x
        c = |x| / |u| within [min_coeff, max_coeff]
        x -= lr c u

    With `fixed_scaling`, the method of the paper, the scaling is fixed after the warm-up. In the warm-up
    a = coeff_beta a + (1 - coeff_beta) c; afterwards p uses the V of the warm-up's end, v is followed further, and

        f = max over elements of (sqrt(V_fixed) + eps) / (sqrt(V) + eps), brought closer to 1 by the part of weight
            decay in u, within [factor_min, factor_max] and within factor_threshold (relative) of the f before
        x -= lr a f u

    c = 1 where |x| or |u| is 0. Layers count their own steps, so one that gets gradients late warms up late.

    Args:
        params: parameters or groups of them.
        lr: step size; any scheduler may change it.
        warmup_steps: steps with exact gradients; the same for all groups. "auto" ends them when v is stable, after
            more than 1 / (1 - b2) steps: see `bagua.optim.WarmedUp`.
        betas: decay of m and v.
        eps: added to the root of v.
        weight_decay: part of u, as above.
        decoupled_weight_decay: True, the default, is LAMB's own: weight decay stays out of m and v and is part of
            the update whose norm the coefficient c divides by, so it is scaled by c too. It is not AdamW's, which
            nothing scales. False is L2 regularisation: g includes weight_decay x, and u = p.
        fixed_scaling: fix V and the layers' coefficients after the warm-up, as in the paper. With 8 bits it learns less
            in what was measured, with 1 bit less on some tasks and more on others (docs/algorithms/one_bit_lamb.md).
            The other options below, but the bounds of c and `variance_floor`, belong to it.
        max_coeff, min_coeff: bounds of c.
        coeff_beta: decay of the running mean a of c.
        factor_max, factor_min: bounds of f.
        factor_threshold: how far f may move in one step.
        variance_floor: share of its tensor's mean that v has at least when the warm-up ends; with `fixed_scaling` also
            while it is fixed and followed, and then the share bounds m / (sqrt(V) + eps), too. Elements that are
            exactly 0 then never had a gradient and no longer move: see `QAdam`.

    Raises:
        ValueError: an argument is wrong; the message names it.

    Source: arXiv:2104.06069 (1-bit LAMB), algorithm 2; the corrections of m and v as in LAMB itself,
        arXiv:1904.00962, algorithm 2.
    Differs: the paper fixes the scaling, because momenta of 1 bit disturb v and c. See the docs for when that pays.
        1-bit LAMB leaves the corrections out. Within the warm-up that only matters to the bounds of c, but
        after a warm-up that is not many times 1 / (1 - b2) steps long, v continues growing for want of one, which f
        takes for larger gradients; it then halves every step. a starts with the first c instead of 0. The paper
        scales layers to a common magnitude before it quantises them with one scale; codecs here have a scale for
        each block, so nothing is to be evened out.

    Examples:
        >>> optimizer = bagua.optim.OneBitLamb(model.parameters(), lr=1e-3, warmup_steps=200)
        >>> model = bagua.distribute(model, optimizer, "one_bit_lamb")
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        warmup_steps: int | str = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        variance_floor: float = 0.01,
        decoupled_weight_decay: bool = True,
        fixed_scaling: bool = False,
    ) -> None:
        defaults = {"lr": lr, "warmup_steps": warmup_steps, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"variance_floor": variance_floor, "decoupled_weight_decay": decoupled_weight_decay}
        defaults |= {"max_coeff": max_coeff, "min_coeff": min_coeff, "coeff_beta": coeff_beta}
        defaults |= {"factor_max": factor_max, "factor_min": factor_min, "factor_threshold": factor_threshold}
        defaults |= {"fixed_scaling": fixed_scaling}
        super().__init__(params, defaults)

    def check_options(self, options: dict[str, Any]) -> None:
        """Check the options of a parameter group."""
        super().check_options(options)
        check_number("min_coeff", options["min_coeff"])
        check_number("max_coeff", options["max_coeff"], options["min_coeff"], open_low=True)
        check_number("coeff_beta", options["coeff_beta"], 0, 1)
        check_number("factor_min", options["factor_min"], 0, 1)
        check_number("factor_max", options["factor_max"], 1)
        check_number("factor_threshold", options["factor_threshold"], open_low=True)
        check_flag("fixed_scaling", options["fixed_scaling"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for slot in (self.state[param] for param in group["params"] if param in self.state):
                end = end_of(group)
                if not group["fixed_scaling"]:
                    for name in ("coeff", "floor", "factor"):
                        slot.pop(name, None)
                    if "exp_avg_sq_fresh" in slot:  # v was fixed, and followed beside it
                        slot["exp_avg_sq"] = with_floor(slot.pop("exp_avg_sq_fresh"), group["variance_floor"])
                        slot["num_updates"], slot["raised"] = slot["step"], True
                elif end is not None and slot["step"] >= end and "coeff" not in slot:
                    raise ValueError(
                        f"state dict: saved by another optimizer, or without fixed_scaling, at step {slot['step']}, "
                        f"after warmup_steps={end} had ended; the layers' scaling coefficients are missing"
                    )

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
            compressed = [one for one in live if not warming(group, one[2])]
            fixed = compressed if group["fixed_scaling"] else []
            if not fixed:
                _raise_variances(group, compressed)
            for batch in batches([one for one in live if not fixed or warming(group, one[2])]):
                self._step_lamb(group, batch)
            for batch in batches(fixed):
                self._step_fixed(group, batch)
        self.end_step()
        return loss

    def _step_lamb(self, group: dict[str, Any], batch: Batch) -> None:
        params, grads, slots = batch
        for slot in slots:
            slot["num_updates"] += 1
        counts = [slot["num_updates"] for slot in slots]
        joined = Joined(params)
        columns = params, grads, [slot["exp_avg"] for slot in slots], [slot["exp_avg_sq"] for slot in slots]
        regular, within = _decays(group)
        for weights, slopes, firsts, seconds in ranges(*columns):
            update_moments(with_decay(slopes, weights, regular), firsts, seconds, group["betas"])
            updates = _ratios(firsts, _roots(seconds, counts, group), slots, group)
            if within:
                torch._foreach_add_(updates, weights, alpha=within)
            joined.add(updates)
        sizes: list[float] = []
        for slot, weight, update in zip(slots, _norms(params), _norms(joined.tensors), strict=True):
            coeff = weight / update if weight > 0 and update > 0 else 1.0
            coeff = min(max(coeff, group["min_coeff"]), group["max_coeff"])
            if group["fixed_scaling"]:
                before = slot.get("coeff", coeff)
                slot["coeff"] = group["coeff_beta"] * before + (1 - group["coeff_beta"]) * coeff
            sizes.append(-float(group["lr"]) * coeff)
        _move(params, joined.tensors, sizes)

    def _step_fixed(self, group: dict[str, Any], batch: Batch) -> None:
        params, _, slots = batch
        for slot in slots:
            if "exp_avg_sq_fresh" not in slot:
                slot["exp_avg_sq_fresh"] = slot["exp_avg_sq"].clone(memory_format=torch.preserve_format)
                slot["floor"] = float(slot["exp_avg_sq"].mean()) * group["variance_floor"]
                slot["exp_avg_sq"].copy_(with_floor(slot["exp_avg_sq"], group["variance_floor"]))
                slot["factor"] = 1.0
        updates, drifts = _fixed_updates(group, batch)
        shares = [1.0] * len(slots)
        within = _decays(group)[1]
        if within:
            alone = _norms(updates)
            torch._foreach_add_(updates, params, alpha=within)
            shares = [min(1.0, a / b) if b > 0 else 1.0 for a, b in zip(alone, _norms(updates), strict=True)]
        for slot, drift, share in zip(slots, drifts, shares, strict=True):
            factor, reach = drift * share + (1 - share), group["factor_threshold"]
            factor = min(max(factor, group["factor_min"]), group["factor_max"])
            slot["factor"] = min(max(factor, slot["factor"] * (1 - reach)), slot["factor"] * (1 + reach))
        _move(params, updates, [-float(group["lr"]) * slot["coeff"] * slot["factor"] for slot in slots])


def _raise_variances(group: dict[str, Any], live: list[tuple[Tensor, Tensor, dict[str, Any]]]) -> None:
    """Give v its floor, once, after the warm-up: momenta of 1 bit would move elements that have no gradient, too."""
    for _, _, slot in live:
        if not slot.get("raised"):  # again it would find the infinite ones
            slot["exp_avg_sq"].copy_(with_floor(slot["exp_avg_sq"], group["variance_floor"]))
            slot["raised"] = True


def _decays(group: dict[str, Any]) -> tuple[float, float]:
    """Weight decay as part of the gradient, and as part of the update."""
    decay = group["weight_decay"]
    return (0.0, decay) if group["decoupled_weight_decay"] else (decay, 0.0)


def _fixed_updates(group: dict[str, Any], batch: Batch) -> tuple[list[Tensor], list[float]]:
    """p of the class, and the largest ratio of the fixed to the followed divisor in each tensor."""
    params, grads, slots = batch
    beta2 = group["betas"][1]
    fixed_at, now = [slot["num_updates"] for slot in slots], [slot["step"] for slot in slots]
    # the floor is that of the corrected moment
    floors = [s["floor"] * (1 - beta2 ** s["step"]) / (1 - beta2 ** s["num_updates"]) for s in slots]
    joined, maxima = Joined(params), list[Tensor]()
    columns = [[slot[name] for slot in slots] for name in ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")]
    regular = _decays(group)[0]
    for weights, slopes, firsts, seconds, fresh in ranges(params, grads, *columns):
        update_moments(with_decay(slopes, weights, regular), firsts, fresh, group["betas"])
        roots = _roots(seconds, fixed_at, group)
        joined.add(_ratios(firsts, bounded(roots, firsts, group["variance_floor"]), slots, group))
        followed = [each.clamp_min(floor) for each, floor in zip(fresh, floors, strict=True)]
        torch._foreach_div_(roots, _roots(followed, now, group))
        maxima.append(torch.stack([root.nan_to_num_(0.0, 0.0, 0.0).max() for root in roots]))
    return joined.tensors, torch.stack(maxima).amax(0).tolist()


def _move(params: list[Tensor], updates: list[Tensor], sizes: list[float]) -> None:
    """Add the updates, which are used up, times the sizes."""
    for weights, changes in ranges(params, updates):
        torch._foreach_mul_(changes, sizes)
        torch._foreach_add_(weights, changes)


def _roots(moments: list[Tensor], updates: list[int], group: dict[str, Any]) -> list[Tensor]:
    """sqrt(V) + eps of second moments after so many updates each."""
    roots = list(torch._foreach_sqrt(moments))
    torch._foreach_div_(roots, [(1 - group["betas"][1] ** count) ** 0.5 for count in updates])
    torch._foreach_add_(roots, group["eps"])
    return roots


def _ratios(
    firsts: list[Tensor], roots: list[Tensor], slots: list[dict[str, Any]], group: dict[str, Any]
) -> list[Tensor]:
    """p of the class."""
    ratios = list(torch._foreach_div(firsts, roots))
    torch._foreach_div_(ratios, [1 - group["betas"][0] ** slot["step"] for slot in slots])
    return ratios


def _norms(tensors: Any) -> list[float]:
    """One wait for the device instead of one per tensor."""
    return torch.stack([norm.double() for norm in torch._foreach_norm(list(tensors))]).tolist()

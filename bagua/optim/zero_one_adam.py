"""0/1 Adam: Adam with ever rarer updates of the second moment, and later local steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor

from bagua.optim.blocked import Batch, batches, ranges
from bagua.optim.checks import check_steps
from bagua.optim.two_stage import TwoStage, bounded, decay_of, raised, shrink, update_moments, with_decay

__all__ = ["StepKind", "ZeroOneAdam"]

_COUNTS = ("num_steps", "drift_left", "drift_size")  # what a step counts in each parameter group


class StepKind(Enum):
    """What the ranks exchange in one step."""

    EXACT = "exact mean of gradients; the second moment is updated"
    MOMENTUM = "mean of quantised momenta"
    LOCAL = "nothing"
    MEET = "mean of quantised drifts, after a local step"


class ZeroOneAdam(TwoStage):
    """0/1 Adam. Used with the algorithm "zero_one_adam"; alone it does not communicate.

    Steps k = 1, 2, ... of the optimizer as a whole; l_k = lr / (1 - b1^k), D = sqrt(v / (1 - b2^j)) + eps after j
    updates of v:

        m = b1 m + (1 - b1) g,  g including weight_decay x;   v = b2 v + (1 - b2) g^2  at variance steps only
        x -= l_k m / D

    Variance steps: k_1 = 1; the distance to the next is 1 for the first `var_update_scaler` of them, 2 for as
    many, then 4, 8, ...; the last is not later than `var_freeze_step`. They take the exact mean gradient, other
    steps up to there a mean of quantised momenta.

    After `var_freeze_step` the ranks synchronise every H steps: 1 for `local_step_scaler` steps, then 2 for as
    many, then 4, ..., at most `local_step_clipper`. Within an interval each rank steps alone and sums its drift
    u += l_k m. At a synchronisation, with L the sum of l_k, M the mean of the quantised u / L, and x_0 the weights at
    the interval's start:

        m = M,   x = x_0 - L M / D

    Decoupled, weight decay is not part of g: x *= s with s = 1 - lr weight_decay comes first in every step. Within an
    interval, with S the product of the s so far, u += l_k m / S and L is the sum of l_k / S. At the end the ranks set

        x = S (x_0 - L M / D)

    which is exactly where one rank alone would be, unless some m / D reaches its bound (see `variance_floor`). At a
    synchronisation weight decay counts for every step of the interval, for parameters too that had a gradient in
    some of them only.

    A parameter whose first gradient comes when no variance step is left has no second moment, and would stay where it
    is: a layer that is unfrozen late, or added. So the algorithm begins both policies anew then. Without the algorithm,
    call `begin_anew`.

    Gradients within an interval are local: use `bagua.GradScaler`, as the decision of torch's own to skip a step
    differs by rank. Checkpoints within an interval differ by rank too, weights included; save and load them on each
    rank.

    Args:
        params: parameters or groups of them.
        lr: step size; any scheduler may change it.
        betas: decay of m and v.
        eps: added to the root of v.
        weight_decay: L2 regularisation, as `torch.optim.Adam` has it, unless decoupled.
        decoupled_weight_decay: weight decay shrinks the weights and stays out of the moments, as in
            `torch.optim.AdamW`.
        var_freeze_step: the last step at which v may be updated, usually the end of the learning rate's warm-up.
        var_update_scaler: kappa of the paper.
        local_step_scaler: steps after which the interval doubles; the paper's policy is the number of steps in
            which the learning rate halves.
        local_step_clipper: the longest interval, a power of two; 1 for no local steps.
        variance_floor: D is made with v raised to at least this share of its tensor's mean; in every step m / D and
            M / D are bounded, by the larger of 10 and 1 / sqrt(variance_floor). See `QAdam`.

    Raises:
        ValueError: an argument is wrong; the message names it.

    Source: arXiv:2202.06009 (0/1 Adam), algorithm 1, and its policies for T_v and T_u.
    Differs: the paper leaves out both bias corrections, which with seldom updates of v makes steps several times
        larger than Adam's; it sends quantised momenta at variance steps too, where the exact mean is known anyway.
        Intervals count steps instead of watching the learning rate. Sums are sent divided by L, so that errors
        fed back have the scale of momenta throughout.

    Examples:
        >>> optimizer = bagua.optim.ZeroOneAdam(model.parameters(), lr=1e-3, var_freeze_step=1000)
        >>> model = bagua.distribute(model, optimizer, "zero_one_adam")
    """

    common: ClassVar[tuple[str, ...]] = (
        "var_freeze_step",
        "var_update_scaler",
        "local_step_scaler",
        "local_step_clipper",
    )
    _counts: list[dict[str, Any]] | None = None  # before the last step

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_768,
        local_step_clipper: int = 16,
        variance_floor: float = 0.01,
        decoupled_weight_decay: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"variance_floor": variance_floor, "decoupled_weight_decay": decoupled_weight_decay}
        defaults |= {"var_freeze_step": var_freeze_step, "var_update_scaler": var_update_scaler}
        defaults |= {"local_step_scaler": local_step_scaler, "local_step_clipper": local_step_clipper}
        super().__init__(params, {**defaults, "num_steps": 0, "begun_after": 0})

    def check_options(self, options: dict[str, Any]) -> None:
        """Check the options of a parameter group."""
        super().check_options(options)
        for name in ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"):
            check_steps(name, options[name])
        if options["local_step_clipper"] & (options["local_step_clipper"] - 1):
            raise ValueError(f"local_step_clipper: expected a power of two, got {options['local_step_clipper']}")

    def recount(self) -> None:
        """Steps are counted for all parameters at once: in local steps each rank may use others."""
        super().recount()
        self._num_steps = max(self._num_steps, *(group["num_steps"] for group in self.param_groups))
        self._begun_after = max(group["begun_after"] for group in self.param_groups)

    def begin_anew(self) -> None:
        """Begin both policies anew, as after no step; momenta and second moments stay, and learn on.

        What was kept of parameters without a second moment is dropped. Call it on all ranks after the same step, where
        their weights are equal. The algorithm does so where `late` parameters had a gradient on any rank.
        """
        for param in [param for param, slot in self.state.items() if not slot.get("num_updates")]:
            del self.state[param]  # in local steps only some ranks had a gradient
        self._begun_after = self._num_steps
        for group in self.param_groups:
            group["begun_after"] = self._begun_after

    def late(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Those of `params` without a second moment where no variance step is left; the same on all ranks."""
        if self._num_steps - self._begun_after <= self.param_groups[0]["var_freeze_step"]:
            return []
        return [param for param in params if param.numel() and not self.state.get(param, {}).get("num_updates")]

    def fixed(self, params: Collection[Tensor]) -> list[Tensor]:
        """Those that have a second moment, where no variance step is left."""
        if self._num_steps - self._begun_after < self.param_groups[0]["var_freeze_step"]:
            return []
        return [param for param in params if self.state.get(param, {}).get("num_updates")]

    def kind(self, step: int) -> StepKind:
        """What the ranks exchange in step `step`, counted from 1; the same on all ranks."""
        options, step = self.param_groups[0], max(step - self._begun_after, 1)
        if step <= options["var_freeze_step"]:
            since, kappa = step - 1, options["var_update_scaler"]
            doublings = (since // kappa + 1).bit_length() - 1
            aligned = (since - kappa * (2**doublings - 1)) % 2**doublings == 0
            return StepKind.EXACT if aligned else StepKind.MOMENTUM
        since, scaler = step - 1 - options["var_freeze_step"], options["local_step_scaler"]
        doublings = min(since // scaler, options["local_step_clipper"].bit_length() - 1)
        interval, place = 2**doublings, since % scaler
        if interval == 1:
            return StepKind.MOMENTUM
        # An interval ends with its stretch at the latest, so that every stretch begins with equal weights.
        return StepKind.MEET if (place + 1) % interval == 0 or place == scaler - 1 else StepKind.LOCAL

    @property
    def compressing(self) -> bool:
        """Whether the next step takes a mean of quantised momenta."""
        return self.kind(self.num_steps + 1) is StepKind.MOMENTUM

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make one step; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = self._num_steps + 1
        kind = self.kind(number)
        self._counts = [{key: group[key] for key in _COUNTS if key in group} for group in self.param_groups]
        for group in self.param_groups:
            group["num_steps"] = number
            size = float(group["lr"]) / (1 - group["betas"][0] ** number)
            left = 1.0
            if kind in (StepKind.LOCAL, StepKind.MEET):
                begun = self.kind(number - 1) is StepKind.LOCAL  # the interval, by an earlier step
                left = (group.get("drift_left", 1.0) if begun else 1.0) * decay_of(group)[1]
                if left <= 0:
                    raise ValueError(
                        f"weight_decay: decoupled decay of {group['weight_decay']:g} at a learning rate of "
                        f"{float(group['lr']):g} would shrink the weights to zero or below"
                    )
                group["drift_left"] = left
                group["drift_size"] = (group.get("drift_size", 0.0) if begun else 0.0) + size / left
            for batch in batches(self.live(group)):
                for slot in batch[2] if kind is StepKind.EXACT else ():
                    slot["num_updates"] += 1
                self._step_batch(group, batch, kind, size, size / left)
        self._num_steps = number
        return loss

    def uncount_step(self) -> None:
        """Take back that the last step was counted; it must have found no gradient. Once per step."""
        if self._counts is None:
            raise RuntimeError("uncount_step: no step was made since the last call")
        for group, counts in zip(self.param_groups, self._counts, strict=True):
            for key in _COUNTS:
                group.pop(key, None)
            group.update(counts)
        self._counts = None
        self._num_steps -= 1

    @torch.no_grad()
    def mean_momenta(self, params: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Write u / L of `params` into `out`: each one's momentum, averaged over this rank's interval."""
        for param, view in zip(params, out, strict=True):
            slot = self.state.get(param, {})
            if "drift" not in slot:
                view.zero_()
            elif size := self._group(param)["drift_size"]:
                torch.div(slot["drift"], size, out=view)
            else:
                view.copy_(slot["exp_avg"])  # a learning rate of 0: no way to divide

    @torch.no_grad()
    def meet(self, params: Sequence[Tensor], means: Sequence[Tensor]) -> None:
        """End the interval of `params`: `means` are the means over the ranks of what `mean_momenta` gave.

        A parameter that never had a gradient on this rank has no second moment anywhere, and stays.
        """
        for param, mean in zip(params, means, strict=True):
            if param in self.state and "exp_avg" in self.state[param]:
                slot, group = self.state[param], self._group(param)
                slot.pop("drift", None)
                anchor = slot.pop("anchor", param)
                columns = [param], [anchor], [mean], [slot["exp_avg"]], [slot["exp_avg_sq"]]
                floor = slot["exp_avg_sq"].mean() * group["variance_floor"]
                left = group.get("drift_left", 1.0) if slot["num_updates"] else 1.0
                for weights, begun, means_, firsts, seconds in ranges(*columns):
                    weights[0].copy_(begun[0])
                    firsts[0].copy_(means_[0])
                    divisors = _divisors(seconds, [slot], [floor], group)
                    divisors = bounded(divisors, means_, group["variance_floor"])
                    torch._foreach_addcdiv_(weights, means_, divisors, -group["drift_size"])
                    shrink(weights, left)

    def _step_batch(self, group: dict[str, Any], batch: Batch, kind: StepKind, size: float, drift: float) -> None:
        params, grads, slots = batch
        is_exact, is_local = kind is StepKind.EXACT, kind in (StepKind.LOCAL, StepKind.MEET)
        decay, left = decay_of(group)
        columns = [params, grads, [slot["exp_avg"] for slot in slots], [slot["exp_avg_sq"] for slot in slots]]
        if is_exact:  # the floor needs all of the new second moment
            for weights, slopes, firsts, seconds in ranges(*columns):
                total = with_decay(slopes, weights, decay)
                update_moments(total, firsts, seconds, group["betas"])
        if is_local:
            for param, slot in zip(params, slots, strict=True):
                if "drift" not in slot:
                    slot["anchor"] = param.detach().clone(memory_format=torch.preserve_format)
                    slot["drift"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            columns.append([slot["drift"] for slot in slots])
        floors = [slot["exp_avg_sq"].mean() * group["variance_floor"] for slot in slots]
        # Alone in its use of a parameter that had no gradient before, a rank would also be alone in shrinking it.
        moving = [not is_local or bool(slot["num_updates"]) for slot in slots]
        for weights, slopes, firsts, seconds, *drifts in ranges(*columns):
            if left != 1.0:
                shrink([each for each, moves in zip(weights, moving, strict=True) if moves], left)
            if not is_exact:
                total = with_decay(slopes, weights, decay)
                torch._foreach_lerp_(firsts, total, 1 - group["betas"][0])
            if is_local:
                torch._foreach_add_(drifts[0], firsts, alpha=drift)
            divisors = bounded(_divisors(seconds, slots, floors, group), firsts, group["variance_floor"])
            torch._foreach_addcdiv_(weights, firsts, divisors, -size)


def _divisors(
    moments: list[Tensor], slots: list[dict[str, Any]], floors: list[Tensor], group: dict[str, Any]
) -> list[Tensor]:
    """D of the class, of `moments` or a range of them."""
    divisors = [raised(moment, floor) for moment, floor in zip(moments, floors, strict=True)]
    torch._foreach_sqrt_(divisors)
    torch._foreach_div_(divisors, [(1 - group["betas"][1] ** slot["num_updates"]) ** 0.5 or 1.0 for slot in slots])
    torch._foreach_add_(divisors, group["eps"])
    return divisors

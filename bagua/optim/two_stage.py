"""Base class of two-stage optimizers: Adam's state, warm-up, and conversion between gradients and momenta."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from bagua.optim.checks import check_betas, check_flag, check_number
from bagua.optim.fused.memory import dense_view, is_dense

__all__ = ["TwoStage"]


class TwoStage(torch.optim.Optimizer):
    """Optimizer with Adam's moments: a normal warm-up, then a fixed second moment.

    While the second moment is fixed, a step is linear in the momentum, so the workers may average quantised
    momenta instead of exact gradients. `to_momentum` and `to_gradient` are the way there and back:

        m_i = b1 m + (1 - b1) g_i  ->  mean of Q(m_i)  ->  g = (mean - b1 m) / (1 - b1)

    after which the optimizer's own `m <- b1 m + (1 - b1) g` gives that mean. So weight decay, gradient clipping
    and loss scaling act on an averaged gradient, as with any other algorithm.

    State of a parameter: `step` (an int), `exp_avg`, `exp_avg_sq`, under the names that `torch.optim.Adam` uses, and
    `num_updates`, how often `exp_avg_sq` was updated. State dicts of Adam and AdamW can be loaded, and bring their
    kind of weight decay along; those made before there was `decoupled_weight_decay` keep the optimizer's own.
    Parameters whose gradient is None are skipped, weight decay included, and their step does not count.
    """

    #: Options that hold for the optimizer as a whole and must be equal in all parameter groups.
    common: ClassVar[tuple[str, ...]] = ()
    _places: dict[Tensor, tuple[int, int]] | None = None  # numbers of each parameter's group, and of it in there

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        defaults = {"decoupled_weight_decay": False, **defaults}
        self.check_options(defaults)
        super().__init__(params, defaults)
        self.recount()

    def check_options(self, options: dict[str, Any]) -> None:
        """Check the options of a parameter group.

        Raises:
            ValueError: names the option.
        """
        check_number("lr", options["lr"])
        check_betas("betas", options["betas"])
        check_number("eps", options["eps"])
        check_number("weight_decay", options["weight_decay"])
        check_number("variance_floor", options["variance_floor"])
        check_flag("decoupled_weight_decay", options["decoupled_weight_decay"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Raises:
            ValueError: an option is wrong, or differs from the other groups' and must not.
        """
        self.check_options({**self.defaults, **param_group})
        for name in self.common:
            if param_group.get(name, self.defaults[name]) != self.defaults[name]:
                raise ValueError(
                    f"{name}: must be the same in all parameter groups, got {param_group[name]!r} "
                    f"beside {self.defaults[name]!r}"
                )
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)  # a state dict of another Adam lacks what Adam has not
        for slot in self.state.values():
            slot["step"] = int(slot.get("step", 0))  # torch keeps it in a tensor
            slot.setdefault("num_updates", slot["step"])  # torch updates the second moment at every step
        self.recount()

    def recount(self) -> None:
        """Recount the steps from the state, after state was written from outside."""
        self._num_steps = max((slot.get("step", 0) for slot in self.state.values()), default=0)

    @property
    def num_steps(self) -> int:
        """Steps made so far: those of the parameter that made most."""
        return self._num_steps

    @property
    def compressing(self) -> bool:
        """Whether the next step takes a mean of quantised momenta."""
        raise NotImplementedError(f"{type(self).__name__} must implement `compressing`")

    def fixed(self, params: Collection[Tensor]) -> list[Tensor]:
        """Those of `params` whose second moment does not learn any more; elements of which it is 0 do not move.

        Only a warning follows from it. An optimizer that does not say names none.
        """
        del params
        return []

    def live(self, group: dict[str, Any]) -> list[tuple[Tensor, Tensor, dict[str, Any]]]:
        """The group's parameters that have a gradient, with it and their state; their step is counted up.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        found: list[tuple[Tensor, Tensor, dict[str, Any]]] = []
        for param in group["params"]:
            grad = param.grad
            if grad is None or not param.numel():  # without elements there is neither a mean nor a largest one
                continue
            if grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            slot = self.state[param]
            if "exp_avg" not in slot:
                slot["step"] = slot["num_updates"] = 0
                slot["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                slot["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            slot["step"] += 1
            self._num_steps = max(self._num_steps, slot["step"])
            found.append((param, grad, slot))
        return found

    def _group(self, param: Tensor) -> dict[str, Any]:
        """The parameter group of `param`. `param_groups` may have been edited since the last call.

        Raises:
            RuntimeError: there is none.
        """
        if (found := self._look_up(param)) is None:
            self._places = {
                each: (number, place)
                for number, group in enumerate(self.param_groups)
                for place, each in enumerate(group["params"])
            }
            found = self._look_up(param)
        if found is None:
            raise RuntimeError(
                f"{type(self).__name__}: a parameter of shape {tuple(param.shape)}, of which it has state, "
                "is in none of its parameter groups"
            )
        return found

    def _look_up(self, param: Tensor) -> dict[str, Any] | None:
        number, place = (self._places or {}).get(param, (len(self.param_groups), 0))
        group = self.param_groups[number] if number < len(self.param_groups) else None
        params = group["params"] if group is not None else ()
        return group if place < len(params) and params[place] is param else None

    def to_momentum(self, params: Sequence[Tensor], values: Sequence[Tensor], scale: Tensor | None = None) -> None:
        """`values`, gradients of `params`, become the momenta that a step with them would give; in place.

        Args:
            scale: what the gradients are multiplied with, and then the momenta.
        """
        for beta1, moments, grads in self._by_beta1(params, values):
            torch._foreach_lerp_(grads, _scaled(moments, scale), beta1)

    def to_gradient(self, params: Sequence[Tensor], values: Sequence[Tensor], scale: Tensor | None = None) -> None:
        """The inverse of `to_momentum`, in place."""
        for beta1, moments, grads in self._by_beta1(params, values):
            torch._foreach_lerp_(grads, _scaled(moments, scale), -beta1 / (1 - beta1))

    def flat_momenta(
        self, params: Sequence[Tensor], scale: Tensor | None = None
    ) -> list[tuple[Tensor, float] | None] | None:
        """Momenta as one dimension, in the order in which the parameters' elements lie in memory, each with its b1.

        None in the place of a parameter without state, see `to_momentum`; None for all if a layout does not allow it.
        With a `scale` they are copies.
        """
        found: list[tuple[Tensor, float] | None] = []
        for param in params:
            moment = self.state[param].get("exp_avg") if param in self.state else None
            if moment is None:
                found.append(None)
                continue
            if moment.stride() != param.stride() or not is_dense(param):
                return None
            flat = dense_view(moment)
            found.append((flat if scale is None else flat * scale, self._group(param)["betas"][0]))
        return found

    def _by_beta1(
        self, params: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Iterable[tuple[float, list[Tensor], list[Tensor]]]:
        """A parameter without state yet has momentum 0: its gradient is as good as its momentum, and is left out."""
        found: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for param, value in zip(params, values, strict=True):
            moment = self.state[param].get("exp_avg") if param in self.state else None
            if moment is not None:
                moments, grads = found.setdefault(self._group(param)["betas"][0], ([], []))
                moments.append(moment)
                grads.append(value)
        return ((beta1, *lists) for beta1, lists in found.items())


def _scaled(moments: list[Tensor], scale: Tensor | None) -> list[Tensor]:
    return moments if scale is None else [moment * scale for moment in moments]


def with_floor(moment: Tensor, floor: float) -> Tensor:
    """A second moment as it is fixed: no element below `floor` times the tensor's mean.

    An element that had hardly any gradient until then (a rare word, a border pixel) has a tiny moment; divided by
    its root, the first gradient of ordinary size would throw the weight far away, and the moment no longer learns.
    Elements that are exactly 0 never had one and become infinite: they stay where they are, instead of following
    the noise of a codec that has no zero.
    """
    return raised(moment, moment.mean() * floor)


def raised(moment: Tensor, least: Tensor) -> Tensor:
    """`with_floor` where the floor itself is known, so that `moment` may be part of a tensor."""
    return torch.threshold(moment, 0, torch.inf).clamp_(min=least)  # a mask would cost ten times as much


@torch.no_grad()
def is_zero(moments: Sequence[Tensor]) -> list[bool]:
    """Whether second moments had nothing but zeros, before or after they were fixed."""
    if not moments:
        return []
    return torch.stack([((moment == 0) | (moment == torch.inf)).all() for moment in moments]).tolist()


def bounded(divisors: list[Tensor], firsts: list[Tensor], variance_floor: float) -> list[Tensor]:
    """`divisors`, raised where a momentum would be more than 10 times its own, or 1 / sqrt(variance_floor) times.

    A floor relative to the tensor does not help a tensor whose gradients are all but 0, for instance the rounding
    errors of a bias before a batch norm: a codec of one bit gives it the magnitude of what shares its block. Where
    v still learns, a momentum is 7.3 times the divisor at most, with Adam's usual decays.
    """
    if not variance_floor:
        return divisors
    least = list(torch._foreach_abs(firsts))
    torch._foreach_mul_(least, min(0.1, variance_floor**0.5))
    torch._foreach_maximum_(least, divisors)
    return least


def with_decay(grads: list[Tensor], params: list[Tensor], weight_decay: float) -> list[Tensor]:
    """Gradients of the loss and of L2 regularisation; the gradients themselves where there is none."""
    return list(torch._foreach_add(grads, params, alpha=weight_decay)) if weight_decay else grads


def decay_of(group: dict[str, Any]) -> tuple[float, float]:
    """What a group's weight decay adds to gradients (times the weights), and what it multiplies the weights by."""
    if group["decoupled_weight_decay"] and group["weight_decay"]:
        return 0.0, 1 - float(group["lr"]) * group["weight_decay"]
    return group["weight_decay"], 1.0


def shrink(params: list[Tensor], by: float) -> None:
    """Decoupled weight decay, in place; the same operation as torch's AdamW, so the same bits."""
    if params and by != 1.0:
        torch._foreach_mul_(params, by)


def update_moments(
    grads: list[Tensor], firsts: list[Tensor], seconds: list[Tensor], betas: tuple[float, float]
) -> None:
    """Adam's m and v, in place; the same operations as torch's, so the same bits."""
    torch._foreach_lerp_(firsts, grads, 1 - betas[0])
    torch._foreach_mul_(seconds, betas[1])
    torch._foreach_addcmul_(seconds, grads, grads, 1 - betas[1])

"""Loss scaling for fp16: ranks skip the same steps, also where their gradients differ."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from bagua.algorithms.base import Payload
from bagua.comm.collectives import all_reduce_
from bagua.engine.engine import Engine
from bagua.engine.hooks import attachments
from bagua.engine.optimizer_discovery import trains
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.skipped_steps import must_agree

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """Gradient scaler for mixed precision: all ranks skip a step if the gradients of one are infinite or NaN.

    It takes the arguments of `torch.amp.GradScaler`. Algorithms that exchange weights step with local gradients, as do
    experts and other parameters that belong to one rank. This class then reduces one number per step over the ranks
    that train the optimizer's modules. With algorithms that exchange gradients it sends nothing: the mean is infinite
    on all ranks, and torch's own scaler works too. With "async" each rank skips steps on its own.

    With `fault_tolerant` (one scaler for the module) a step that is lost leaves scale and growth tracker as they are.
    Ranks that average gradients get those of one rank when the members have changed, and a rank that joins gets them in
    any case. Nothing is reduced: where ranks step with local gradients, each has a scale of its own, and the step of a
    rank whose gradients are infinite counts, but changes nothing.

    Examples:
        >>> scaler = bagua.GradScaler(inputs.device.type)
        >>> scaler.scale(model(inputs).square().mean()).backward()
        >>> _ = scaler.step(optimizer)
        >>> scaler.update()
    """

    ranks_agree = True  # what `skipped_steps.refuse_plain_scaler` looks for
    _step_lost = False  # since the last `update`

    def scale(self, outputs: Any) -> Any:
        """See `torch.amp.GradScaler.scale`."""
        if self._enabled:
            for manager in _managers_here():
                manager.loss_scale.follow(self)
        return super().scale(outputs)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """See `torch.amp.GradScaler.step`."""
        manager = next((m for engine in _engines_of(optimizer) if (m := engine.failures.recovery) is not None), None)
        if manager is None:
            return super().step(optimizer, *args, **kwargs)
        before = manager.attempts
        value = super().step(optimizer, *args, **kwargs)
        self._step_lost |= bool(manager.lost) if manager.attempts == before else manager.dropped
        return value

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """See `torch.amp.GradScaler.update`. After a step that is lost, it changes nothing."""
        lost, self._step_lost = self._step_lost, False
        if lost and new_scale is None and self._enabled:  # one that is disabled has nothing to clear
            self._per_optimizer_states.clear()
        else:
            super().update(new_scale)

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        if any(_skips_alone(engine) for engine in _engines_of(optimizer)):
            if any(value.item() for value in optimizer_state["found_inf_per_device"].values()):
                optimizer.zero_grad(set_to_none=True)
            return optimizer.step(*args, **kwargs)
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        engines = _engines_of(optimizer)
        for engine in engines:
            engine.tracker.units.follow(self._scale)
            if (manager := engine.failures.recovery) is not None:
                manager.loss_scale.follow(self, sure=True)
                if (
                    engine.failures.step_is_lost
                ):  # gradients are dropped, or will be: the optimizers must step all the same
                    return {found_inf.device: found_inf}
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for engine in engines:
            own = engine.inventory.trains_its_own
            if engine.failures.recovery is not None:
                if not _skips_alone(engine) and must_agree(engine.algorithm, engine.optimizers, 2, own):
                    raise RuntimeError(
                        f"fault_tolerant: {engine.algorithm.name!r} averages gradients in some steps and not in "
                        "others, so ranks would skip different steps with a GradScaler; train in bf16, without one"
                    )
            elif must_agree(engine.algorithm, engine.optimizers, engine.team.size, own):
                _agree(engine, found)
        return found


def _engines_of(optimizer: torch.optim.Optimizer) -> list[Engine]:
    """Of the modules that `optimizer` trains."""
    return [attachment.engine for attachment in attachments.all() if trains(attachment, optimizer)]


def _managers_here() -> list[RecoveryManager]:
    """Of the fault-tolerant module of this thread; there may be several where ranks are threads."""
    found = [m for attachment in attachments.all() if (m := attachment.engine.failures.recovery) is not None]
    return [each for each in found if len(found) == 1 or each.thread == threading.get_ident()]


def _skips_alone(engine: Engine) -> bool:
    """Whether a step without gradients counts, so that ranks need not skip the same ones."""
    return engine.failures.recovery is not None and engine.algorithm.payload is Payload.PARAM


def _agree(engine: Engine, found: dict[torch.device, Tensor]) -> None:
    """All-reduce (max) the values of `found`; a rank without gradients gets a value too.

    Raises:
        RuntimeError: within a join, where ranks that have run out of inputs have no scaler.
    """
    if engine.tracker.joining is not None:
        raise RuntimeError(
            f"join: {engine.algorithm.name!r} steps with local gradients; it cannot be combined with a GradScaler"
        )
    device = engine.inventory.device
    values = [value.to(device, torch.float32) for value in found.values()] or [
        torch.zeros((), dtype=torch.float32, device=device)
    ]
    with engine.dispatcher.side_exchange("GradScaler") as group:
        agreed = all_reduce_(group, torch.stack(values).amax().reshape(1), "max")[0]
    for where, value in found.items():
        found[where] = agreed.to(where, value.dtype)
    if not found:
        found[device] = agreed

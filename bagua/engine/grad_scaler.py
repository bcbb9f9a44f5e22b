"""Loss scaling for fp16: ranks skip the same steps, also where their gradients differ."""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.comm.collectives import all_reduce_
from bagua.engine.engine import Engine
from bagua.engine.hooks import attachments
from bagua.engine.optimizer_discovery import trains
from bagua.engine.skipped_steps import must_agree

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """Gradient scaler for mixed precision: all ranks skip a step if the gradients of one are infinite or NaN.

    It takes the arguments of `torch.amp.GradScaler`. Algorithms that exchange weights step with local gradients, as do
    experts and other parameters that belong to one rank. This class then reduces one number per step over the ranks
    that train the optimizer's modules. With algorithms that exchange gradients it sends nothing: the mean is infinite
    on all ranks, and torch's own scaler works too. With "async" each rank skips steps on its own.

    Examples:
        >>> scaler = bagua.GradScaler(inputs.device.type)
        >>> scaler.scale(model(inputs).square().mean()).backward()
        >>> _ = scaler.step(optimizer)
        >>> scaler.update()
    """

    ranks_agree = True  # what `skipped_steps.refuse_plain_scaler` looks for

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for attachment in attachments.all():
            engine = attachment.engine
            own = engine.inventory.trains_its_own
            agrees = must_agree(engine.algorithm, engine.optimizers, engine.team.size, own)
            if agrees and trains(attachment, optimizer):
                _agree(engine, found)
        return found


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
    values = [value.to(device, torch.float32) for value in found.values()] or [torch.zeros((), device=device)]
    with engine.dispatcher.side_exchange("GradScaler") as group:
        agreed = all_reduce_(group, torch.stack(values).amax().reshape(1), "max")[0]
    for where, value in found.items():
        found[where] = agreed.to(where, value.dtype)
    if not found:
        found[device] = agreed

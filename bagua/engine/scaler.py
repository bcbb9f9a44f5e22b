"""Loss scaling for fp16: ranks skip the same steps, also where their gradients differ."""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.comm.collectives import all_reduce_
from bagua.engine.attachment import attachments
from bagua.engine.engine import Engine
from bagua.engine.skipping import must_agree

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, by which all ranks skip a step if the gradients of one are infinite or NaN.

    With algorithms that exchange gradients, torch's own does that too: the mean is infinite on all ranks, and no
    message is sent here. Algorithms that exchange weights step with local gradients; one number a step is then
    reduced over the ranks that train the optimizer's modules together. With "async", where no rank waits for
    another, each rank skips its own steps.
    """

    ranks_agree = True  # what `skipping.refuse_plain_scaler` looks for

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        for attachment in list(attachments.values()):
            engine = attachment.engine
            if any(each is optimizer for each in engine.optimizers) and must_agree(engine):
                _agree(engine, found)
        return found


def _agree(engine: Engine, found: dict[torch.device, Tensor]) -> None:
    """Set every value of `found` to the largest one of any rank; a rank without gradients gets a value too.

    Raises:
        RuntimeError: within a join, where ranks that have run out of inputs have no scaler.
    """
    if engine.joining is not None:
        raise RuntimeError(f"join: {engine.algorithm.name!r} steps with local gradients; a GradScaler cannot be used")
    device = engine.inventory.device
    values = [value.to(device, torch.float32) for value in found.values()] or [torch.zeros((), device=device)]
    agreed = all_reduce_(engine.side_groups.world, torch.stack(values).amax().reshape(1), "max")[0]
    for where, value in found.items():
        found[where] = agreed.to(where, value.dtype)
    if not found:
        found[device] = agreed

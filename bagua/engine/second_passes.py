"""Several synchronised backward passes before a step, where a pass leaves no gradient behind but a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bagua.algorithms.base import Algorithm

__all__ = ["refuse_second_pass"]


@torch.no_grad()
def refuse_second_pass(algorithm: Algorithm, params: Sequence[nn.Parameter], first: int) -> None:
    """At the beginning of a synchronised pass that is not the first one since the last step: check what it adds to.

    Where gradients were zeroed after the former pass, as for a step that is made again, nothing is added to.

    Args:
        algorithm: that is in force.
        params: the trainable parameters.
        first: of them, the one whose gradient has already been accumulated; -1: none.

    Raises:
        RuntimeError: gradients hold steps of a size of their own.
    """
    if algorithm.scales_with_loss:
        return
    gradients = (param.grad for index, param in enumerate(params) if index != first)
    if any(gradient is not None and bool(gradient.any()) for gradient in gradients):
        raise RuntimeError(
            f"{algorithm.name!r} has made a step of the gradients of a backward pass, and another pass would add its "
            "gradients to that step; run all backward passes before an optimizer's step but the last within "
            "bagua.no_sync(module), or zero the gradients in between"
        )

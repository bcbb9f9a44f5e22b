"""Steps that a gradient scaler makes or skips: checks that all ranks decide alike, and that steps have their size."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from bagua.algorithms.base import Algorithm, Exactness

__all__ = ["must_agree", "refuse_plain_scaler", "scale_of_step", "steps_by_plain_scaler"]

_FRAMES = 11  # from an optimizer's hook up to the scaler that calls step(), with room for what wraps step()


def must_agree(
    algorithm: Algorithm, optimizers: Sequence[torch.optim.Optimizer], size: int, trains_its_own: bool = False
) -> bool:
    """Whether `size` ranks that step together see different gradients; `trains_its_own`: see `Inventory`."""
    waits = algorithm.exactness is not Exactness.ASYNCHRONOUS and size > 1
    return waits and (trains_its_own or not algorithm.shares_gradients(optimizers))


def refuse_plain_scaler(
    algorithm: Algorithm,
    optimizers: Sequence[torch.optim.Optimizer],
    size: int,
    trains_its_own: bool = False,
    fault_tolerant: bool = False,
) -> None:
    """From an optimizer's hook: raise if a scaler makes this step, and must not.

    Any scaler, if what the optimizers get does not grow with the loss; one of torch's, if ranks may decide differently.

    Args:
        fault_tolerant: ranks may be lost and join, with steps that some of them drop.

    Raises:
        RuntimeError: names the algorithm and the way out.
    """
    if not algorithm.scales_with_loss and _stepping_scaler() is not None:
        raise RuntimeError(
            f"{algorithm.name!r} makes steps whose size does not depend on that of the gradients, so a GradScaler "
            "would divide them by the loss scale; train in bf16 or fp32, without one"
        )
    if fault_tolerant and steps_by_plain_scaler():
        raise RuntimeError(
            "fault_tolerant: torch.amp.GradScaler fails in a step that is lost, and a rank that joins would not get "
            "its scale; use bagua.GradScaler, which takes the same arguments"
        )
    if not must_agree(algorithm, optimizers, size, trains_its_own):
        return
    if steps_by_plain_scaler():
        who = "a module with parameters that are this rank's own" if trains_its_own else repr(algorithm.name)
        raise RuntimeError(
            f"{who} steps with local gradients, so torch.amp.GradScaler would skip a step "
            "on one rank and not on another; use bagua.GradScaler, which takes the same arguments"
        )


def steps_by_plain_scaler() -> bool:
    """From an optimizer's hook: whether a scaler of torch's makes this step, and ranks may decide differently."""
    scaler = _stepping_scaler()
    return scaler is not None and not getattr(scaler, "ranks_agree", False)


def scale_of_step() -> torch.Tensor | None:
    """From an optimizer's hook: the loss scale of the scaler that makes this step, which changes with it; None: 1."""
    return getattr(_stepping_scaler(), "_scale", None)


def _stepping_scaler() -> Any:
    """The enabled gradient scaler that calls the optimizer; None if there is none."""
    frame: Any = sys._getframe(2)
    for _ in range(_FRAMES):
        frame = frame.f_back
        if frame is None:
            return None
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            # Of this frame only: before Python 3.13, to look at a frame's locals keeps them alive until it ends.
            scaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
    return None

"""Do all ranks decide alike to skip an optimizer's step?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from bagua.algorithms.base import Exactness

if TYPE_CHECKING:
    from bagua.engine.launcher import Launcher

__all__ = ["must_agree", "refuse_plain_scaler"]

_FRAMES = 10  # from an optimizer's hook up to the scaler that calls step(), with room for what wraps step()


def must_agree(engine: Launcher) -> bool:
    """Whether ranks that step together see different gradients."""
    algorithm = engine.algorithm
    waits = algorithm.exactness is not Exactness.ASYNCHRONOUS and engine.team.size > 1
    return waits and not algorithm.shares_gradients(engine.optimizers)


def refuse_plain_scaler(engine: Launcher) -> None:
    """From an optimizer's hook: raise if a scaler of torch's makes this step and ranks may decide differently.

    Raises:
        RuntimeError: names the algorithm and the way out.
    """
    if not must_agree(engine):
        return
    frame: Any = sys._getframe(1)
    for _ in range(_FRAMES):
        frame = frame.f_back
        if frame is None:
            return
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            # Of this frame only: before Python 3.13, to look at a frame's locals keeps them alive until it ends.
            scaler = frame.f_locals["self"]
            if scaler.is_enabled() and not getattr(scaler, "ranks_agree", False):
                raise RuntimeError(
                    f"{engine.algorithm.name!r} steps with local gradients, so torch.amp.GradScaler would skip a step "
                    "on one rank and not on another; use bagua.GradScaler, which takes the same arguments"
                )
            return

"""Defaults of algorithms that take local steps, depending on the optimizers that take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["interval_of", "told", "uses_adam"]


def interval_of(algorithm: Any) -> int:
    """Return the steps from one exchange of `algorithm` to the next, where it was not fitted to optimizers yet, too."""
    return int(getattr(algorithm, "communication_interval", 1) or algorithm.interval)


def uses_adam(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether all optimizers are of Adam's kind: every group of parameters has `betas`.

    Their steps are as long with the noise of one rank's small batch as without, so the weights of the ranks move apart
    faster than with SGD and want to be averaged more often (docs/algorithms/local_sgd.md has figures).
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return bool(groups) and all("betas" in group for group in groups)


def told(name: str, optimizers: Sequence[torch.optim.Optimizer], interval: int, codec: str) -> str:
    """Return the notice on defaults that were fitted to `optimizers`."""
    kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in optimizers))
    return f"{name}: with {kinds} a round every {interval} steps, codec {codec!r} (communication_interval, codec)"

"""Frameworks make torch's gradient scaler; algorithms that step with local gradients need Bagua's."""

from __future__ import annotations

import torch

from bagua.engine import GradScaler

__all__ = ["agreeing_scaler"]


def agreeing_scaler(scaler: torch.amp.GradScaler, device: torch.device) -> torch.amp.GradScaler:
    """Return a `bagua.GradScaler` like `scaler`, by which all ranks skip the same steps.

    A class derived from torch's is returned as it is: an algorithm that needs more refuses it at the first step.
    """
    if type(scaler) not in (torch.amp.GradScaler, torch.cuda.amp.GradScaler):
        return scaler
    return GradScaler(
        device.type,
        init_scale=scaler.get_scale() if scaler.is_enabled() else 2.0**16,
        growth_factor=scaler.get_growth_factor() if scaler.is_enabled() else 2.0,
        backoff_factor=scaler.get_backoff_factor() if scaler.is_enabled() else 0.5,
        growth_interval=scaler.get_growth_interval() if scaler.is_enabled() else 2000,
        enabled=scaler.is_enabled(),
    )

"""Lengths to sample."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LENGTHS", "bimodal", "log_normal"]


def log_normal(count: int) -> Tensor:
    """Median 90 tokens, sigma 0.8, 1 to 2000; the shape of sentences and utterances."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 0.8 + 4.5).exp().clamp(1, 2000).ceil()


def bimodal(count: int) -> Tensor:
    """Nine in ten around 40 tokens and one in ten around 1200; the shape of titles among documents."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    short = torch.rand(count, generator=generator) < 0.9
    return torch.where(short, 40 + 10 * noise, 1200 + 200 * noise).clamp(4, 2000).ceil()


LENGTHS = {"log-normal": log_normal, "bimodal": bimodal}

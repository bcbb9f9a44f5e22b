"""Samples per second of all ranks and iterations, and what is printed of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Interval", "gather_rates", "interval"]

_NORMAL_95 = 1.96  # deviations on either side of the mean that hold 95 % of a normal distribution


class Interval(NamedTuple):
    """A mean and half the width of the interval around it that holds 95 % of the iterations, if they are normal."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:.1f} +-{self.half_width:.1f}"


def interval(rates: Tensor) -> Interval:
    """Return mean and 1.96 population deviations of the iterations, as Bagua 0.9 prints them.

    Shapes: [I].
    """
    return Interval(rates.mean().item(), _NORMAL_95 * rates.std(correction=0).item())


def gather_rates(mine: list[float]) -> Tensor:
    """Return all ranks' samples per second, [R, I]. Collective; all ranks bring as many."""
    own = torch.tensor(mine, dtype=torch.float64)
    table = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(table, own)
    return torch.stack(table)

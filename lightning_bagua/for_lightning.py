"""The strategy for the package `lightning`."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_bagua.training import BaguaTraining

__all__ = ["BaguaStrategy", "StrategyRegistry"]


class BaguaStrategy(BaguaTraining, DDPStrategy):
    """See `BaguaTraining`."""

"""The strategy for the package `pytorch_lightning`."""

from __future__ import annotations

from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_bagua.training import BaguaTraining

__all__ = ["BaguaStrategy", "StrategyRegistry"]


class BaguaStrategy(BaguaTraining, DDPStrategy):  # pyright: ignore
    """See `BaguaTraining`."""

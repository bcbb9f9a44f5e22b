"""The strategy for the package `pytorch_lightning`."""

from __future__ import annotations

from lightning_fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_bagua.fabric_training import BaguaFabricTraining
from lightning_bagua.training import BaguaTraining

__all__ = ["FABRIC_REGISTRY", "BaguaFabricStrategy", "BaguaStrategy", "StrategyRegistry"]


class BaguaStrategy(BaguaTraining, DDPStrategy):  # pyright: ignore
    """See `BaguaTraining`."""


class BaguaFabricStrategy(BaguaFabricTraining, FabricDDPStrategy):  # pyright: ignore
    """See `BaguaFabricTraining`."""

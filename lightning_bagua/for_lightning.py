"""The strategy for the package `lightning`."""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_bagua.fabric_training import BaguaFabricTraining
from lightning_bagua.training import BaguaTraining

__all__ = ["FABRIC_REGISTRY", "BaguaFabricStrategy", "BaguaStrategy", "StrategyRegistry"]


class BaguaStrategy(BaguaTraining, DDPStrategy):
    """See `BaguaTraining`."""


class BaguaFabricStrategy(BaguaFabricTraining, FabricDDPStrategy):
    """See `BaguaFabricTraining`."""

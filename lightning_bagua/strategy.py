"""Where the original had the class: `from lightning_bagua.strategy import BaguaStrategy`."""

from __future__ import annotations

from bagua.gone import Gone
from lightning_bagua import BaguaStrategy

__all__ = ["BaguaStrategy", "LightningBaguaModule"]

LightningBaguaModule = Gone("LightningBaguaModule", "BaguaStrategy distributes the LightningModule itself, unwrapped")

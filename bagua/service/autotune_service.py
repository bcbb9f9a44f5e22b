"""The original's tuning server: its names, which say what there is instead."""

from __future__ import annotations

from bagua.gone import Gone
from bagua.service import INSTEAD, AutotuneClient, AutotuneService

__all__ = ["AutotuneClient", "AutotuneService", "AutotuneServiceTaskManager"]

AutotuneServiceTaskManager = Gone("bagua.service.autotune_service.AutotuneServiceTaskManager", INSTEAD)

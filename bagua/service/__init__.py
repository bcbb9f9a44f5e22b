"""The original's tuning server: its names, which say that rank 0 tunes instead."""

from __future__ import annotations

from bagua.gone import Gone

__all__ = ["AutotuneClient", "AutotuneService"]

INSTEAD = (
    "no server is needed: bagua.distribute(..., autotune=True) or bagua run --autotune-level 1 tunes, "
    "through the process group's store"
)

AutotuneClient = Gone("bagua.service.AutotuneClient", INSTEAD)
AutotuneService = Gone("bagua.service.AutotuneService", INSTEAD)

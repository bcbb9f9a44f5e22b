"""The original's place of the gate and of the layer without dropout."""

from __future__ import annotations

from bagua.moe import MOELayer, TopKGate

__all__ = ["MOELayer", "TopKGate"]

"""The original's place of `MoE`."""

from __future__ import annotations

from bagua.moe import MoE

__all__ = ["MoE"]

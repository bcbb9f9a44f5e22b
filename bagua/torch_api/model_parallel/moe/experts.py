"""The original's place of `Experts`."""

from __future__ import annotations

from bagua.moe import Experts

__all__ = ["Experts"]

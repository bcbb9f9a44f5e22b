"""The original's place of `is_moe_param`."""

from __future__ import annotations

from bagua.moe import is_moe_param

__all__ = ["is_moe_param"]

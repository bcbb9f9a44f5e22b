"""The original's place of `MoE` and `is_moe_param`; both are in `bagua.moe`."""

from __future__ import annotations

from bagua.moe import MoE, is_moe_param

__all__ = ["MoE", "is_moe_param"]

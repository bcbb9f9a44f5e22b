"""Mixture of experts: a layer with its experts sharded over the ranks; each token goes to one or two of them."""

from __future__ import annotations

from bagua.engine.startup.rank_local import mark_rank_local
from bagua.moe.clip import clip_grad_norm_
from bagua.moe.experts import Experts, is_moe_param
from bagua.moe.gate import TopKGate
from bagua.moe.layer import MoE, MOELayer
from bagua.moe.routing import Routing, capacity_of, top_1, top_2

__all__ = [
    "Experts",
    "MOELayer",
    "MoE",
    "Routing",
    "TopKGate",
    "capacity_of",
    "clip_grad_norm_",
    "is_moe_param",
    "mark_rank_local",
    "top_1",
    "top_2",
]

"""Samplers that give the ranks equal work in every step.

complexities.py   what each sample costs: computed, given, or cached on disk
progress.py       epoch and position, which all samplers here have; resuming in the middle of an epoch
chunks.py         Bagua 0.9's sampler: neighbours in cost at the same step
batches.py        Bagua 0.9's batch sampler: batches that a function makes
token_budget.py   batches of a budget of tokens
"""

from __future__ import annotations

from bagua.data.balance.batches import LoadBalancingDistributedBatchSampler
from bagua.data.balance.chunks import LoadBalancingDistributedSampler
from bagua.data.balance.complexities import complexities
from bagua.data.balance.token_budget import TokenBudgetBatchSampler

__all__ = [
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "TokenBudgetBatchSampler",
    "complexities",
]

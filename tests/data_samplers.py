"""Samplers of `bagua.data` over the same 90 lengths, as `elastic.Resharded` makes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.data import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
    TokenBudgetBatchSampler,
)

__all__ = ["LENGTHS", "make_balanced", "make_batches", "make_tokens"]

LENGTHS = torch.randint(5, 60, (90,), generator=torch.Generator().manual_seed(1)).tolist()


def make_tokens(indices: Sequence[int], size: int, rank: int) -> TokenBudgetBatchSampler:
    return TokenBudgetBatchSampler([LENGTHS[i] for i in indices], 150, num_replicas=size, rank=rank)


def make_balanced(indices: Sequence[int], size: int, rank: int) -> LoadBalancingDistributedSampler:
    return LoadBalancingDistributedSampler(indices, [LENGTHS[i] for i in indices], size, rank)


def make_batches(indices: Sequence[int], size: int, rank: int) -> LoadBalancingDistributedBatchSampler:
    return LoadBalancingDistributedBatchSampler(
        make_balanced(indices, size, rank), lambda ids: [ids[at : at + 4] for at in range(0, len(ids), 4)]
    )

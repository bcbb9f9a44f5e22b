"""Samplers to compare: for each rank its batches of one epoch, as lists of sample numbers.

Those with a fixed batch size get the one with which an epoch has as many steps as with Bagua's budget.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler

from bagua.data import LoadBalancingDistributedSampler, TokenBudgetBatchSampler

__all__ = ["CONTENDERS", "Missing", "batch_size"]

Batches = list[list[int]]


class Missing(Exception):
    """The contender is not installed."""


def batch_size(lengths: Tensor, budget: float, ranks: int) -> int:
    """Samples of a rank in a step, on average, of Bagua's batches."""
    steps = len(TokenBudgetBatchSampler(lengths, budget, ranks, 0))
    return max(1, round(len(lengths) / steps / ranks))


def _plain(lengths: Tensor, budget: float, ranks: int) -> list[Batches]:
    size = batch_size(lengths, budget, ranks)
    data: Any = range(len(lengths))
    return [list(BatchSampler(DistributedSampler(data, ranks, rank), size, False)) for rank in range(ranks)]


def _chunks(lengths: Tensor, budget: float, ranks: int) -> list[Batches]:
    size = batch_size(lengths, budget, ranks)
    samplers = [LoadBalancingDistributedSampler(lengths, lengths, ranks, rank) for rank in range(ranks)]
    return [list(BatchSampler(sampler, size, False)) for sampler in samplers]


def _budget(lengths: Tensor, budget: float, ranks: int) -> list[Batches]:
    sampler = TokenBudgetBatchSampler(lengths, budget, ranks, 0)
    return [list(sampler.batches(rank)) for rank in range(ranks)]


def _hugging_face(lengths: Tensor, budget: float, ranks: int) -> list[Batches]:
    kind = _imported("transformers.trainer_pt_utils", "transformers").DistributedLengthGroupedSampler
    size, numbers = batch_size(lengths, budget, ranks), lengths.int().tolist()
    samplers = [kind(size, lengths=numbers, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    return [list(BatchSampler(sampler, size, False)) for sampler in samplers]


def _lhotse(lengths: Tensor, budget: float, ranks: int) -> list[Batches]:
    lhotse = _imported("lhotse", "lhotse")
    sampler = _imported("lhotse.dataset", "lhotse").DynamicBucketingSampler
    cuts = lhotse.CutSet.from_cuts(
        lhotse.MonoCut(id=str(number), start=0, duration=float(length), channel=0)
        for number, length in enumerate(lengths.tolist())
    ).to_eager()
    made: list[Batches] = []
    for rank in range(ranks):
        batches: Iterable[Any] = sampler(
            cuts, max_duration=budget, num_buckets=30, shuffle=True, world_size=ranks, rank=rank
        )
        made.append([[int(cut.id) for cut in batch] for batch in batches])
    return made


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Missing(f"{package} is not installed ({error})") from None


CONTENDERS: dict[str, Callable[[Tensor, float, int], list[Batches]]] = {
    "torch DistributedSampler": _plain,
    "Hugging Face length-grouped": _hugging_face,
    "lhotse dynamic bucketing": _lhotse,
    "bagua LoadBalancingDistributedSampler": _chunks,
    "bagua TokenBudgetBatchSampler": _budget,
}


def seed() -> None:
    """Samplers that draw from torch's global generator draw the same in each run."""
    torch.manual_seed(0)

"""Samples in the order of their complexity, and batches of a size that depends on it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from bagua.torch_api.contrib.load_balancing_data_loader import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)


def _sampler(n: int) -> tuple[TensorDataset, Any]:
    dataset = TensorDataset(torch.randn(n, 2), torch.randperm(n))
    return dataset, LoadBalancingDistributedSampler(
        dataset, complexity_fn=lambda sample: sample[1], num_replicas=1, rank=0, shuffle=False
    )


def test_samples_come_by_complexity() -> None:
    dataset, sampler = _sampler(10)
    assert [int(label) for _, label in DataLoader(dataset, batch_size=1, sampler=sampler)] == list(range(10))


def test_batches_grow() -> None:
    def growing(indices: list[int]) -> list[list[int]]:
        batches, start = [], 0
        while start < len(indices):
            batches.append(indices[start : start + len(batches) + 1])
            start += len(batches)
        return batches

    dataset, sampler = _sampler(15)
    batches = LoadBalancingDistributedBatchSampler(sampler, batch_fn=growing)
    found = [labels.tolist() for _, labels in DataLoader(dataset, batch_sampler=batches)]
    assert found == [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13, 14]]

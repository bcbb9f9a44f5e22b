"""The original's samplers, with its contract and without its faults."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from bagua.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler, complexities
from bagua.torch_api.contrib import LoadBalancingDistributedSampler as FacadeSampler
from bagua.torch_api.contrib.load_balancing_data_loader import LoadBalancingDistributedBatchSampler as FacadeBatches
from tests.rank_pool import RankPool


def samplers(data: Any, ranks: int, **options: Any) -> list[LoadBalancingDistributedSampler]:
    return [LoadBalancingDistributedSampler(data, lambda x: x, ranks, rank, **options) for rank in range(ranks)]


def test_facade() -> None:
    assert issubclass(FacadeSampler, LoadBalancingDistributedSampler)
    assert issubclass(FacadeBatches, LoadBalancingDistributedBatchSampler)


def test_order_without_shuffling() -> None:
    """Ascending chunks, wrapped around at the end; as the original's own test has it."""
    data = [5, 1, 4, 2, 3, 0, 6]
    assert [list(s) for s in samplers(data, 2, shuffle=False)] == [[5, 3, 2, 6], [1, 4, 0, 5]]
    assert [list(s) for s in samplers(data, 2, shuffle=False, drop_last=True)] == [[5, 3, 2], [1, 4, 0]]
    assert [list(s) for s in samplers([7], 3)] == [[0], [0], [0]]
    assert [list(s) for s in samplers([7], 3, drop_last=True)] == [[], [], []]


@settings(max_examples=100, deadline=None)
@given(
    data=st.lists(st.integers(-100, 100), min_size=1, max_size=50),
    ranks=st.integers(1, 7),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    level=st.sampled_from([0, 0.3, 1]),
    epoch=st.integers(0, 5),
)
def test_every_sample_once(
    data: list[int], ranks: int, drop_last: bool, shuffle: bool, level: float, epoch: int
) -> None:
    made = samplers(data, ranks, drop_last=drop_last, shuffle=shuffle, random_level=level)
    for sampler in made:
        sampler.set_epoch(epoch)
    by_rank = [list(sampler) for sampler in made]
    assert {len(indices) for indices in by_rank} == {len(made[0])}
    seen = [sample for indices in by_rank for sample in indices]
    if drop_last:
        assert len(seen) == len(set(seen)) == len(data) - len(data) % ranks
    else:
        assert set(seen) == set(range(len(data))) and len(seen) - len(data) == -len(data) % ranks
    if level == 0 and not drop_last and len(data) % ranks == 0:
        costs = sorted(tuple(sorted(data[i] for i in step)) for step in zip(*by_rank, strict=True))
        assert all(one[-1] <= other[0] for one, other in pairwise(costs))  # chunks of neighbours


def test_noise_mixes_and_left_out_samples_change() -> None:
    data = list(range(100))

    def chunks(epoch: int, level: float) -> set[frozenset[int]]:
        made = samplers(data, 4, random_level=level)
        for sampler in made:
            sampler.set_epoch(epoch)
        return set(map(frozenset, zip(*made, strict=True)))

    assert chunks(0, 0) == chunks(1, 0)
    assert chunks(0, 0.5) != chunks(1, 0.5)
    left_out = set()
    for epoch in range(20):
        made = samplers(data, 3, drop_last=True)
        for sampler in made:
            sampler.set_epoch(epoch)
        left_out |= set(data) - {sample for sampler in made for sample in sampler}
    assert len(left_out) > 10


def test_batches() -> None:
    """batch_fn is called on every rank's samples; ranks with fewer batches begin again."""

    def by_value(data: list[int]) -> Any:
        def batch_fn(indices: list[int]) -> list[list[int]]:
            batches: list[list[int]] = [[]]
            for index in indices:
                if batches[-1] and sum(data[i] for i in batches[-1]) + data[index] > 10:
                    batches.append([])
                batches[-1].append(index)
            return batches

        return batch_fn

    data = [1, 9, 2, 8, 1, 9, 1, 9]
    for drop_last in (False, True):
        made = [
            LoadBalancingDistributedBatchSampler(sampler, by_value(data), drop_last=drop_last)
            for sampler in samplers(data, 2, shuffle=False)
        ]
        whole = [by_value(data)(list(sampler.sampler)) for sampler in made]
        count = (min if drop_last else max)(map(len, whole))
        assert {len(batches) for batches in whole} == {2, 3}
        for sampler, batches in zip(made, whole, strict=True):
            assert len(sampler) == count and list(sampler) == [batches[at % len(batches)] for at in range(count)]


def test_len_is_what_comes() -> None:
    """The original gave 9 batches where its length was 3."""
    data = list(range(60))

    def uneven(indices: list[int]) -> list[list[int]]:
        size = 2 if 0 in indices else 7
        return [indices[at : at + size] for at in range(0, len(indices), size)]

    for drop_last, expected in ((True, 3), (False, 10)):
        made = [
            LoadBalancingDistributedBatchSampler(sampler, uneven, drop_last)
            for sampler in samplers(data, 3, shuffle=False)
        ]
        for sampler in made:
            assert len(sampler) == len(list(sampler)) == expected
            assert len(list(DataLoader(data, batch_sampler=sampler))) == expected  # pyright: ignore[reportArgumentType]


def test_set_epoch_and_resume_of_both() -> None:
    data = [x * 37 % 101 for x in range(40)]

    def make() -> tuple[LoadBalancingDistributedSampler, LoadBalancingDistributedBatchSampler]:
        sampler = LoadBalancingDistributedSampler(data, data, 2, 1)
        return sampler, LoadBalancingDistributedBatchSampler(sampler, lambda indices: [[i] for i in indices])

    sampler, batches = make()
    sampler.set_epoch(1)
    by_sampler = list(batches)
    batches.set_epoch(2)
    assert sampler.epoch == 2 and list(batches) != by_sampler
    batches.set_epoch(1)
    iterator = iter(batches)
    begun = [next(iterator) for _ in range(5)]
    assert begun == by_sampler[:5]
    state = batches.state_dict()
    sampler, batches = make()
    batches.load_state_dict(state)
    batches.set_epoch(1)
    assert begun + list(batches) == by_sampler
    sampler, _ = make()
    iterator = iter(sampler)
    begun_samples = [next(iterator) for _ in range(7)]
    state = sampler.state_dict()
    resumed, _ = make()
    resumed.load_state_dict(state)
    assert begun_samples + list(resumed) == list(make()[0])


def test_complexities_are_cached(tmp_path: Path) -> None:
    calls: list[int] = []

    def cost(sample: int) -> float:
        calls.append(sample)
        return sample * 2

    file = tmp_path / "sub" / "costs.pt"
    for _ in range(2):
        values = complexities([3, 4, 5], cost, cache=file, key="doubled")
        assert values.tolist() == [6, 8, 10] and calls == [3, 4, 5]
    assert complexities([3, 4], cost, cache=file, key="doubled").tolist() == [6, 8]  # another dataset
    assert len(calls) == 5
    complexities([3, 4], cost, cache=file, key="else")
    assert len(calls) == 7
    file.write_bytes(file.read_bytes()[:-40])  # cut off
    assert complexities([3, 4], cost, cache=file, key="else").tolist() == [6, 8]
    assert len(calls) == 9
    assert list(tmp_path.glob("sub/.*")) == []
    for given_values in ([6, 8], np.array([6, 8]), torch.tensor([6, 8])):
        assert list(LoadBalancingDistributedSampler([3, 4], given_values, 1, 0, shuffle=False)) == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"complexity_fn": [1]}, "1 numbers for 2 samples"),
        ({"complexity_fn": lambda _: float("inf")}, "complexity_fn: expected finite numbers, got inf for sample 0"),
        ({"random_level": 2}, "random_level"),
        ({"rank": 5}, "rank: expected 0 to 1, got 5"),
        ({"dataset": []}, "expected at least one sample"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadBalancingDistributedSampler(
            **{"dataset": [1, 2], "complexity_fn": lambda x: x, "num_replicas": 2, "rank": 0, **options}
        )


def test_bad_batch_fn() -> None:
    sampler = LoadBalancingDistributedSampler([1, 2], [1, 2], 2, 0, shuffle=False)
    with pytest.raises(TypeError, match="must return a list of batches"):
        list(LoadBalancingDistributedBatchSampler(sampler, lambda indices: indices))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no batch for rank 0"):
        list(LoadBalancingDistributedBatchSampler(sampler, lambda i: [] if i == [0] else [i]))
    with pytest.raises(TypeError, match="expected a LoadBalancingDistributedSampler, got list"):
        LoadBalancingDistributedBatchSampler([1], lambda i: [i])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="epoch"):
        sampler.set_epoch(-1)


def on_a_rank() -> tuple[int, list[int]]:
    sampler = LoadBalancingDistributedSampler(list(range(10)), list(range(10)))
    return sampler.num_replicas, list(sampler)


def test_ranks_are_those_of_the_job(pool: RankPool) -> None:
    (size, first), (_, second) = pool.run(2, on_a_rank)
    assert size == 2
    assert sorted(first + second) == list(range(10))
    assert all(abs(a - b) == 1 for a, b in zip(first, second, strict=True))

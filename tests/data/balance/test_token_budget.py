"""Budgeted batches: every sample once, equal work in each step, reproducible, resumable."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from bagua.data import TokenBudgetBatchSampler
from tests.rank_pool import RankPool


def lengths_of(count: int, seed: int = 0) -> torch.Tensor:
    """Log-normal: a median of 90, some ten times as long."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * 0.8 + 4.5).exp().clamp(1, 2000).ceil()


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.floats(0.5, 500), min_size=1, max_size=60),
    ranks=st.integers(1, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    max_samples=st.none() | st.integers(1, 5),
    epoch=st.integers(0, 3),
)
def test_what_holds_for_any_lengths(
    lengths: list[float], ranks: int, shuffle: bool, drop_last: bool, max_samples: int | None, epoch: int
) -> None:
    budget = max(lengths) * 2.5
    samplers = [
        TokenBudgetBatchSampler(
            lengths, budget, ranks, rank, shuffle=shuffle, drop_last=drop_last, max_samples=max_samples, jitter=0.1
        )
        for rank in range(ranks)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    by_rank = [list(sampler) for sampler in samplers]
    seen = [sample for batches in by_rank for batch in batches for sample in batch]
    repeated, missing = len(seen) - len(set(seen)), len(lengths) - len(set(seen))
    if drop_last:
        assert repeated == 0 and missing == len(lengths) % ranks
    else:
        assert missing == 0 and repeated == -len(lengths) % ranks
    assert {len(batches) for batches in by_rank} == {len(samplers[0])}
    for step in zip(*by_rank, strict=True):
        assert len({len(batch) for batch in step}) == 1
        for batch in step:
            assert 0 < len(batch) <= (max_samples or math.inf)
            assert len(batch) * max(lengths[sample] for sample in batch) <= budget * (1 + 1e-12)
    assert by_rank == [list(sampler) for sampler in samplers]  # and again
    assert by_rank == [list(samplers[0].batches(rank)) for rank in range(ranks)]


@pytest.mark.parametrize("bimodal", [False, True])
def test_steps_are_balanced_and_hardly_padded(bimodal: bool) -> None:
    lengths = lengths_of(60_000)
    if bimodal:
        lengths[::2] = lengths[::2] / 20 + 8
    sampler = TokenBudgetBatchSampler(lengths, 8000, 8, 0)
    steps = list(zip(*(sampler.batches(rank) for rank in range(8)), strict=True))
    padded = torch.tensor([[len(batch) * lengths[batch].max().item() for batch in step] for step in steps])
    sums = torch.tensor([[lengths[batch].sum().item() for batch in step] for step in steps])
    for cost in (padded, sums):
        assert (cost.amax(1) / cost.mean(1)).mean() <= 1.02
    assert padded.sum() / sums.sum() < 1.06
    assert padded.mean() > 0.9 * 8000  # the budget is used


def test_epochs_differ_and_repeat() -> None:
    def batches(epoch: int, seed: int = 0, shuffle: bool = True) -> list[list[int]]:
        sampler = TokenBudgetBatchSampler(lengths_of(2000), 4000, 4, 1, seed=seed, shuffle=shuffle)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert batches(3) == batches(3)
    kept = {frozenset(batch) for batch in batches(0)} & {frozenset(batch) for batch in batches(1)}
    assert len(kept) < 0.1 * len(batches(0))
    assert batches(0) != batches(0, seed=1)
    assert batches(0, shuffle=False) == batches(1, shuffle=False)
    in_order = [max(lengths_of(2000)[batch].tolist()) for batch in batches(0, shuffle=False)]
    assert in_order == sorted(in_order, reverse=True)


def test_resuming_in_mid_epoch() -> None:
    resume_in_mid_epoch(0)


def test_resuming_in_mid_epoch_with_workers(pool: RankPool) -> None:
    pool.run(1, resume_in_mid_epoch, 2, init=False, fresh=True)


def resume_in_mid_epoch(num_workers: int) -> None:
    lengths = lengths_of(300)

    def loader() -> DataLoader:
        sampler = TokenBudgetBatchSampler(lengths, 3000, 2, 1)
        context = "fork" if num_workers else None
        return DataLoader(
            range(300),  # pyright: ignore[reportArgumentType]
            batch_sampler=sampler, num_workers=num_workers, collate_fn=list, multiprocessing_context=context,
        )  # fmt: skip

    def sampler_of(loader: DataLoader) -> TokenBudgetBatchSampler:
        assert isinstance(loader.batch_sampler, TokenBudgetBatchSampler)
        return loader.batch_sampler

    whole = loader()
    sampler_of(whole).set_epoch(2)
    expected = list(whole)
    begun = loader()
    sampler_of(begun).set_epoch(2)
    used, state = [], {}
    for number, batch in enumerate(begun, 1):
        used.append(batch)
        if number == 3:
            state = sampler_of(begun).state_dict(given=number)  # workers run ahead
            break
    resumed = loader()
    sampler_of(resumed).load_state_dict(state)
    sampler_of(resumed).set_epoch(2)  # as a loop over epochs does
    assert used + list(resumed) == expected
    sampler_of(resumed).set_epoch(3)
    sampler_of(whole).set_epoch(3)
    assert list(resumed) == list(whole)


def test_state_of_others_is_refused() -> None:
    sampler = TokenBudgetBatchSampler(lengths_of(50), 3000, 2, 1)
    state = sampler.state_dict()
    TokenBudgetBatchSampler(lengths_of(50), 3000, 2, 0).load_state_dict(state)  # ranks may be dealt anew
    with pytest.raises(ValueError, match="state: num_replicas was 2 and is 4"):
        TokenBudgetBatchSampler(lengths_of(50), 3000, 4, 1).load_state_dict(state)
    with pytest.raises(ValueError, match="state: lengths was"):
        TokenBudgetBatchSampler(lengths_of(50, seed=1), 3000, 2, 1).load_state_dict(state)
    with pytest.raises(ValueError, match="given: expected 0 to"):
        sampler.state_dict(given=1000)


def test_position_without_workers() -> None:
    sampler = TokenBudgetBatchSampler(lengths_of(300), 3000, 2, 0)
    iterator = iter(sampler)
    first = [next(iterator) for _ in range(4)]
    state = sampler.state_dict()
    assert state["position"] == 4
    other = TokenBudgetBatchSampler(lengths_of(300), 3000, 2, 0)
    other.load_state_dict(state)
    assert first + list(other) == list(TokenBudgetBatchSampler(lengths_of(300), 3000, 2, 0))
    assert list(iterator) and sampler.state_dict()["position"] == len(sampler)  # the epoch is over


@pytest.mark.parametrize("given", [True, False])
def test_a_state_of_the_end_of_an_epoch_does_not_repeat_it(given: bool) -> None:
    sampler = TokenBudgetBatchSampler(lengths_of(300), 3000, 2, 0)
    sampler.set_epoch(1)
    whole = list(sampler)
    state = sampler.state_dict(given=len(whole) if given else None)
    other = TokenBudgetBatchSampler(lengths_of(300), 3000, 2, 0)
    other.load_state_dict(state)
    assert list(other) == []
    assert list(other) == whole  # without set_epoch, another iteration begins anew
    other.load_state_dict(state)
    other.set_epoch(1)
    assert list(other) == []
    other.load_state_dict(state)
    other.set_epoch(2)
    sampler.set_epoch(2)
    assert list(other) == list(sampler) != whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": []}, "lengths: expected at least one sample"),
        ({"lengths": [1.0, float("nan")]}, "lengths: expected finite numbers, got nan for sample 1"),
        ({"lengths": [1.0, 0.0]}, "lengths: expected numbers > 0, got 0.0 for sample 1"),
        ({"lengths": [1.0, 101.0]}, "max_tokens: 100 is less than the length of sample 1, 101"),
        ({"max_tokens": float("nan")}, "max_tokens"),
        ({"num_replicas": 0}, "num_replicas: expected 1 or more, got 0"),
        ({"rank": 2}, "rank: expected 0 to 1, got 2"),
        ({"jitter": 1.0}, "jitter"),
        ({"max_samples": 0}, "max_samples"),
    ],
)
def test_bad_input(options: dict[str, object], message: str) -> None:
    given_options = {"lengths": [1.0, 2.0], "max_tokens": 100, "num_replicas": 2, "rank": 0, **options}
    with pytest.raises(ValueError, match=message):
        TokenBudgetBatchSampler(**given_options)  # pyright: ignore[reportArgumentType]


def test_bad_types() -> None:
    with pytest.raises(TypeError, match="seed: expected an int, got float"):
        TokenBudgetBatchSampler([1.0], 1, 1, 0, seed=0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="lengths: expected a number for each sample"):
        TokenBudgetBatchSampler(["long"], 1, 1, 0)
    with pytest.raises(RuntimeError, match="give both, or call bagua.init_process_group"):
        TokenBudgetBatchSampler([1.0], 1)

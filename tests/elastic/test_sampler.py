"""No sample twice, none left out, whatever number of ranks takes over where."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from bagua import elastic
from bagua.elastic import Resharded, Sampler
from tests.data_samplers import LENGTHS, make_balanced, make_batches, make_tokens
from tests.rank_pool import RankPool

DATA = range(101)
HUNDRED: Any = list(range(100))


def ranks(size: int, state: dict[str, Any] | None = None, **options: Any) -> list[Sampler]:
    made = [Sampler(DATA, seed=3, num_replicas=size, rank=rank, **options) for rank in range(size)]
    for sampler in made:
        sampler.set_epoch(2)
        if state is not None:
            sampler.load_state_dict(state)
    return made


def take(samplers: Sequence[Any], num: int) -> list[Any]:
    """`num` items of each, round after round."""
    iterators = [iter(sampler) for sampler in samplers]
    return [item for _ in range(num) for iterator in iterators for item in itertools.islice(iterator, 1)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_order_is_that_of_distributed_sampler(shuffle: bool, drop_last: bool) -> None:
    for rank in range(4):
        torchs = DistributedSampler(HUNDRED, num_replicas=4, rank=rank, shuffle=shuffle, seed=3, drop_last=drop_last)
        ours = Sampler(torchs, num_replicas=4, rank=rank)
        for epoch in range(2):
            torchs.set_epoch(epoch)
            ours.set_epoch(epoch)
            assert list(ours) == list(torchs)
            assert len(ours) == len(torchs) and ours.position == 100 and ours.over


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("drop_last", [True, False])
def test_every_sample_once_while_the_number_of_ranks_changes(seed: int, drop_last: bool) -> None:
    rng = random.Random(seed)
    state, seen = None, []
    size = 1
    while state is None or state["position"] < len(DATA):
        size = rng.randint(1, 5)
        samplers = ranks(size, state, drop_last=drop_last)
        seen += take(samplers, min(rng.randint(1, 8), len(samplers[0])))
        states = [sampler.state_dict() for sampler in samplers]
        assert all(each == states[0] for each in states)
        state = states[0]
        if len(ranks(size, state, drop_last=drop_last)[0]) == 0:
            break
    counts = Counter(seen)
    if drop_last:
        assert max(counts.values()) == 1 and len(DATA) - len(counts) < size
    else:
        assert len(counts) == len(DATA) and len(seen) - len(DATA) < size


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_batch_of_all_ranks_stays_the_same(seed: int, drop_last: bool) -> None:
    """Each step uses the next samples of the order, whatever the number of ranks; shares differ by one at most."""
    rng = random.Random(seed)
    order = list(ranks(1)[0])
    batch, state = rng.randint(5, 12), None
    for step in range(-(-len(order) // batch)):
        samplers = ranks(rng.randint(1, 5), state, drop_last=drop_last, global_batch_size=batch)
        expected = order[step * batch : (step + 1) * batch]
        if drop_last and len(expected) < batch:
            assert all(len(sampler) == 0 and list(sampler) == [] for sampler in samplers)
            break
        assert {len(sampler) for sampler in samplers} == {-(-(len(order) - step * batch) // batch) - (
            drop_last and len(order) % batch > 0
        )}  # fmt: skip
        shares = take(samplers, 1)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        missing = max(len(shares) - len(expected), 0)  # each rank has one sample at least
        assert sorted(index for share in shares for index in share) == sorted(expected + order[:missing])
        state = samplers[0].state_dict()
        left = len(order) - (step + 1) * batch
        assert len(order) - state["position"] == (0 if left < (batch if drop_last else 1) else left)


def test_more_ranks_than_the_batch_has_samples() -> None:
    samplers = ranks(5, global_batch_size=2)
    assert [len(share) for share in take(samplers, 1)] == [1] * 5
    assert samplers[0].position == 5


def workers(number: int) -> Any:
    """Arguments of a loader on a fresh rank, whose workers would else be spawned and import torch, as it was itself."""
    return {"num_workers": number, "multiprocessing_context": "fork" if number else None}


def test_a_loader_that_runs_ahead_is_not_counted(pool: RankPool) -> None:
    pool.run(1, count_what_a_loader_gives, init=False, fresh=True)


def count_what_a_loader_gives() -> None:
    """Its workers have been given eight batches when the training has seen two."""
    sampler = Sampler(DATA, num_replicas=2, rank=0)
    data = TensorDataset(torch.arange(len(DATA)))
    loader = DataLoader(data, batch_size=5, sampler=sampler, **workers(2), prefetch_factor=3)
    seen = list(itertools.islice(sampler.track(loader), 2))
    assert sampler.position == 2 * 5 * 2
    again = Sampler(DATA, num_replicas=2, rank=0)
    again.load_state_dict(sampler.state_dict())
    rest = [
        index for (batch,) in again.track(DataLoader(data, batch_size=5, sampler=again)) for index in batch.tolist()
    ]
    first = [index for (batch,) in seen for index in batch.tolist()]
    whole = Sampler(DATA, num_replicas=2, rank=0)
    assert first + rest == list(whole)
    assert again.position == len(DATA)


def test_positions_of_an_epoch_after_a_resumed_one(pool: RankPool) -> None:
    pool.run(1, track_after_a_resume, init=False, fresh=True)


def track_after_a_resume() -> None:
    data = TensorDataset(torch.arange(len(DATA)))
    sampler = Sampler(DATA, num_replicas=1, rank=0)
    sampler.load_state_dict({**sampler.state_dict(), "position": 80})
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for begin in (80, 0):
        positions = [sampler.position for _ in sampler.track(loader)]
        assert positions == [*range(begin + 4, len(DATA), 4), len(DATA)]


def test_a_tracked_epoch_is_whole_after_a_look_at_a_batch(pool: RankPool) -> None:
    pool.run(1, track_after_a_look, init=False, fresh=True)


def track_after_a_look() -> None:
    data = TensorDataset(torch.arange(len(DATA)))
    for number in (0, 2):
        sampler = Sampler(DATA, num_replicas=1, rank=0)
        loader = DataLoader(data, batch_size=4, sampler=sampler, **workers(number))
        next(iter(loader))
        for _ in range(2):
            seen = [index for (batch,) in sampler.track(loader) for index in batch.tolist()]
            assert sorted(seen) == list(DATA)
            assert len(loader) == -(-len(DATA) // 4)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="source"):
        Sampler(iter([1]), num_replicas=1, rank=0)
    with pytest.raises(ValueError, match="rank: expected 0 to 1"):
        Sampler(DATA, num_replicas=2, rank=2)
    with pytest.raises(RuntimeError, match="num_replicas and rank"):
        Sampler(DATA)
    for wrong in (0, True, 2.0):
        with pytest.raises(ValueError, match="global_batch_size: expected an integer >= 1"):
            Sampler(DATA, num_replicas=1, rank=0, global_batch_size=wrong)  # pyright: ignore[reportArgumentType]
    batches = Sampler(DATA, num_replicas=1, rank=0, global_batch_size=2)
    with pytest.raises(TypeError, match="loader: pass this sampler as batch_sampler"):
        batches.track(DataLoader(HUNDRED, sampler=batches))
    sampler = Sampler(DATA, num_replicas=1, rank=0)
    with pytest.raises(TypeError, match="loader: pass this sampler as sampler"):
        sampler.track(DataLoader(HUNDRED, batch_sampler=sampler))
    with pytest.raises(ValueError, match="epoch"):
        sampler.set_epoch(-1)
    with pytest.raises(ValueError, match="sampler: seed was 0 and is 1"):
        Sampler(DATA, seed=1, num_replicas=1, rank=0).load_state_dict(sampler.state_dict())
    for name, wrong in (("position", -1), ("position", None), ("epoch", "1")):
        with pytest.raises(ValueError, match=f"sampler: {name} of the state: expected an integer >= 0, got {wrong!r}"):
            sampler.load_state_dict({**sampler.state_dict(), name: wrong})
    with pytest.raises(TypeError, match="does not draw from this sampler"):
        next(sampler.track(DataLoader(HUNDRED)))


@pytest.mark.parametrize("make", [make_tokens, make_balanced, make_batches])
@pytest.mark.parametrize("sizes", [(3, 2), (2, 3, 3, 2), (1, 3)])
def test_balanced_samplers_go_on_with_what_is_left(make: Any, sizes: tuple[int, ...]) -> None:
    state, seen = None, []
    for at, size in enumerate(sizes):
        samplers = [Resharded(make, len(LENGTHS), num_replicas=size, rank=rank) for rank in range(size)]
        for sampler in samplers:
            sampler.set_epoch(1)
            if state is not None:
                sampler.load_state_dict(state)
        num = len(samplers[0]) if at == len(sizes) - 1 else 2
        seen += take(samplers, num)
        states = [sampler.state_dict() for sampler in samplers]
        assert all(each == states[0] for each in states)
        state = states[0]
        assert samplers[0].over == (at == len(sizes) - 1)
    flat = [index for item in seen for index in (item if isinstance(item, list) else [item])]
    extra = len(flat) - len(LENGTHS)
    assert set(flat) == set(range(len(LENGTHS)))
    assert extra < max(sizes) * (4 if make is make_batches else 1)


def test_as_many_ranks_go_on_with_the_same_plan() -> None:
    whole = [Resharded(make_tokens, len(LENGTHS), num_replicas=2, rank=0)]
    expected = list(whole[0])
    first = Resharded(make_tokens, len(LENGTHS), num_replicas=2, rank=0)
    begun = list(itertools.islice(first, 3))
    second = Resharded(make_tokens, len(LENGTHS), num_replicas=2, rank=0)
    second.load_state_dict(first.state_dict())
    assert begun + list(second) == expected
    with pytest.raises(ValueError, match="num_samples was 90"):
        Resharded(make_tokens, 91, num_replicas=2, rank=0).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="the state is not of a Resharded"):
        second.load_state_dict(Sampler(range(len(LENGTHS)), num_replicas=2, rank=0).state_dict())
    for damage in ({"epoch": -1}, {"history": None}, {"history": [[2]]}, {"history": [[2, -1]]}, {"history": [3]}):
        (key,) = damage
        with pytest.raises(ValueError, match=f"sampler: {key} of the state: expected"):
            second.load_state_dict({**first.state_dict(), **damage})
    with pytest.raises(ValueError, match="num_samples"):
        Resharded(make_tokens, 0, num_replicas=2, rank=0)


def test_tracking_a_batch_sampler(pool: RankPool) -> None:
    pool.run(1, track_a_batch_sampler, init=False, fresh=True)


def track_a_batch_sampler() -> None:
    sampler = Resharded(make_tokens, len(LENGTHS), num_replicas=1, rank=0)
    data: Any = list(range(len(LENGTHS)))
    loader = DataLoader(data, batch_sampler=sampler, **workers(1))
    batches = list(itertools.islice(sampler.track(loader), 2))
    assert sampler.state_dict()["history"] == [[1, 2]] and len(batches) == 2


def test_resize_scales_learning_rates() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert elastic.Resize(4, 2).scale_lr(optimizer, scheduler) == 0.5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert elastic.Resize(1, 4).scale_lr(optimizer, power=0.5) == 2.0
    assert elastic.Resize(4, 3).split(48) == 16
    with pytest.raises(ValueError, match="global_batch: 48"):
        elastic.Resize(4, 5).split(48)

"""Where iterations of all samplers begin: at the start of the epoch, or at a position that was loaded."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
from typing import Any

import pytest
from torch.utils.data import DataLoader

from bagua.elastic import Resharded, Sampler
from tests.data_samplers import LENGTHS, make_balanced, make_batches, make_tokens
from tests.rank_pool import RankPool
from tests.sampler_script import RunsAhead, Script, flat

SAMPLES: Any = range(len(LENGTHS))

SAMPLERS = {
    "elastic": lambda: Sampler(SAMPLES, num_replicas=2, rank=1),
    "elastic_batches": lambda: Sampler(SAMPLES, num_replicas=2, rank=0, global_batch_size=7),
    "resharded_tokens": lambda: Resharded(make_tokens, len(LENGTHS), num_replicas=2, rank=0),
    "resharded_balanced": lambda: Resharded(make_balanced, len(LENGTHS), num_replicas=2, rank=1),
    "tokens": lambda: make_tokens(SAMPLES, 2, 1),
    "balanced": lambda: make_balanced(SAMPLES, 2, 0),
    "batches": lambda: make_batches(SAMPLES, 2, 1),
}
every_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)


def with_loader(
    make: Any, num_workers: int = 0, drop_last: bool = False, **options: Any
) -> tuple[Any, DataLoader[Any]]:
    """A sampler and its loader: of batches of four samples, or of the sampler's batches."""
    sampler = make()
    if num_workers:
        options["multiprocessing_context"] = "fork"
    if isinstance(next(iter(make())), list):
        options["batch_sampler"] = sampler
    else:
        options.update(sampler=sampler, batch_size=4, drop_last=drop_last)
    return sampler, DataLoader(SAMPLES, num_workers=num_workers, **options)


@every_sampler
def test_the_end_of_an_epoch_is_a_position_if_it_was_loaded(make: Any) -> None:
    sampler, again = make(), make()
    whole = list(sampler)
    again.load_state_dict(sampler.state_dict())
    assert sampler.over and not again.over
    assert list(again) == [] and len(again) == 0
    assert list(again) == whole, "without set_epoch the epoch is over once"
    again.load_state_dict(sampler.state_dict())
    again.set_epoch(0)
    assert list(again) == list(again) == []
    again.set_epoch(1)
    assert len(again) == len(list(again)) > 0
    again.set_epoch(0)
    assert list(again) == whole


@every_sampler
def test_without_set_epoch_the_order_is_repeated(make: Any) -> None:
    """As that of `DistributedSampler`."""
    sampler = make()
    whole = list(sampler)
    assert len(whole) > 8
    assert list(sampler) == whole and list(sampler) == whole
    sampler.set_epoch(0)
    assert list(sampler) == whole


@every_sampler
def test_a_look_at_the_first_items_takes_none_away(make: Any) -> None:
    """Of a loader that asks for more, or of a model's summary, before training."""
    sampler, loaded = make(), make()
    whole = list(make())
    list(itertools.islice(sampler, 5))
    assert list(sampler) == whole
    list(itertools.islice(sampler, 3))
    loaded.load_state_dict(sampler.state_dict())
    for _ in range(2):
        list(itertools.islice(loaded, 2))
        assert len(loaded) == len(whole) - 3
    assert list(loaded) == whole[3:] and list(loaded) == whole


@every_sampler
def test_the_length_stays_during_an_epoch(make: Any) -> None:
    """Loops compare the number of a batch with it, and divide by it after the epoch."""
    sampler = make()
    total = len(sampler)
    assert [len(sampler) for _ in sampler] == [total] * total and len(sampler) == total
    rest = make()
    list(itertools.islice(sampler, 3))
    rest.load_state_dict(sampler.state_dict())
    assert [len(rest) for _ in rest] == [total - 3] * (total - 3)


@every_sampler
def test_a_look_for_which_all_that_is_left_is_fetched_takes_none_away(
    make: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As workers do that run ahead. A script that never calls `set_epoch` can't tell such a look from an epoch."""
    monkeypatch.setattr(multiprocessing, "active_children", list)  # ranks of other tests may be left
    sampler, loaded = make(), make()
    whole = list(sampler)
    sampler.set_epoch(0)
    list(itertools.islice(sampler, len(whole) - 2))
    loaded.load_state_dict(sampler.state_dict())
    assert list(loaded) == whole[-2:] and list(loaded) == whole
    loaded.load_state_dict(sampler.state_dict())
    list(loaded)
    loaded.set_epoch(0)
    assert list(loaded) == list(loaded) == whole[-2:] and not caplog.records
    for _ in range(2):
        assert list(loaded) == whole[-2:]
    assert [record.message[:37] for record in caplog.records] == ["sampler: the rest of epoch 0, which w"]
    loaded.set_epoch(1)
    assert len(list(loaded)) == len(loaded) > 2
    loaded.set_epoch(0)
    assert list(loaded) == whole


@every_sampler
def test_what_was_loaded_stays_while_loops_are_broken_off(make: Any) -> None:
    """A look at the first batch of a resumed epoch takes nothing away."""
    sampler, (loaded, loader) = make(), with_loader(make)
    whole = list(make())
    list(itertools.islice(sampler, 2))
    loaded.load_state_dict(sampler.state_dict())
    next(iter(loader))
    for _ in loader:
        break
    assert len(loaded) == len(whole) - 2 and len(loader) == len(list(loader))
    loaded.load_state_dict(sampler.state_dict())
    assert list(loaded) == whole[2:]


@every_sampler
def test_a_tracked_loop_counts_what_it_has_seen(make: Any) -> None:
    """With a loader that drops the last batch, the epoch is over at its end."""
    sampler, loader = with_loader(make, drop_last=True)
    loaded, rest_of = with_loader(make, drop_last=True)
    whole = flat(make())
    seen = flat(itertools.islice(sampler.track(loader), 2))
    assert seen == whole[: len(seen)] and not sampler.over
    loaded.load_state_dict(sampler.state_dict())
    rest = flat(loaded.track(rest_of))
    assert loaded.over and rest == whole[len(seen) :][: len(rest)] and len(whole) - len(seen) - len(rest) < 4
    assert flat(loaded.track(rest_of))[: len(seen)] == seen, "the epoch is repeated without set_epoch"
    with pytest.raises(TypeError, match="does not draw from this sampler"):
        sampler.track(DataLoader(SAMPLES))


@pytest.mark.parametrize("name", ["tokens", "balanced", "batches"])
def test_damaged_states_are_refused(name: str) -> None:
    sampler = SAMPLERS[name]()
    for key, wrong in (("position", -1), ("position", None), ("epoch", True)):
        with pytest.raises(ValueError, match=f"state: {key}: expected an integer >= 0, got {wrong!r}"):
            sampler.load_state_dict({**sampler.state_dict(), key: wrong})


def test_an_epoch_that_is_set_at_the_sampler_of_samples() -> None:
    batches = make_batches(SAMPLES, 2, 1)
    whole = list(batches)
    list(itertools.islice(batches, 3))
    batches.load_state_dict(batches.state_dict())
    assert len(batches) == len(whole) - 3
    batches.sampler.set_epoch(0)
    assert list(batches) == list(batches) == whole[3:]
    batches.sampler.set_epoch(1)
    assert len(batches) == len(list(batches)) == len(whole)
    assert batches.state_dict()["epoch"] == 1
    other = make_balanced(SAMPLES, 2, 1)
    other.set_epoch(2)
    batches.sampler.load_state_dict(other.state_dict())
    expected = make_batches(SAMPLES, 2, 1)
    expected.set_epoch(2)
    assert list(batches) == list(expected) and batches.epoch == 2


@every_sampler
def test_what_goes_on_after_the_epoch_was_set_does_not_count(make: Any) -> None:
    sampler, loader = with_loader(make)
    fresh = make()
    fresh.set_epoch(1)
    for iterator in (iter(sampler), sampler.track(loader)):
        next(iterator)
        sampler.set_epoch(1)
        list(iterator)
        assert sampler.state_dict() == fresh.state_dict() and not sampler.over
        sampler.set_epoch(0)


@every_sampler
def test_a_pass_outside_track_does_not_count_in_a_tracked_loop(make: Any) -> None:
    """An evaluation on the loader of the training, in an epoch or between two."""
    sampler, loader = with_loader(make)
    whole, total = flat(loader), len(loader)
    sampler.set_epoch(0)
    for number, _ in enumerate(sampler.track(loader), 1):
        state = sampler.state_dict()
        assert flat(loader) == whole
        assert sampler.state_dict() == state and sampler.over == (number == total) and len(loader) == total
    sampler.set_epoch(1)
    state = sampler.state_dict()
    list(loader)
    assert sampler.state_dict() == state and not sampler.over


@every_sampler
def test_a_pass_before_the_tracked_loop_takes_nothing_from_a_resumed_epoch(make: Any) -> None:
    (sampler, loader), (loaded, rest) = with_loader(make), with_loader(make)
    seen = flat(itertools.islice(sampler.track(loader), 3))
    list(loader)
    loaded.load_state_dict(sampler.state_dict())
    for _ in range(2):
        list(rest)
    assert seen + flat(loaded.track(rest)) == flat(make())
    assert flat(loaded.track(rest)) == flat(make()), "the epoch is repeated without set_epoch"


def test_a_state_that_counts_what_workers_have_fetched_is_warned_of(pool: RankPool) -> None:
    pool.run(1, count_warnings, init=False, fresh=True)


def count_warnings() -> None:
    """Once, within a loop over a loader with workers, also if all is fetched; and what to do is named."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("bagua").addHandler(handler)
    for name, make in SAMPLERS.items():
        for prefetch_factor in (1, 100):
            sampler, loader = with_loader(make, 1, prefetch_factor=prefetch_factor)
            for _ in loader:
                if name in ("tokens", "balanced", "batches"):
                    sampler.state_dict(given=1)
                    assert not messages
                for _ in range(2):
                    sampler.state_dict()
                break
            assert len(messages) == 1 and "iterate with sampler.track(loader)" in messages.pop()
        sampler, loader = with_loader(make, 1)
        next(iter(loader))
        for _ in sampler.track(loader):
            sampler.state_dict()
            break
        sampler, loader = with_loader(make, 0)
        for _ in loader:
            sampler.state_dict()
        assert not messages
    sampler, loader = with_loader(SAMPLERS["elastic"], 1)
    list(loader)
    sampler.state_dict()
    assert not messages, "the epoch has ended"


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sample_is_trained_on_once_however_a_script_is_killed(name: str) -> None:
    kills = 0
    for seed in range(60):
        script = Script(SAMPLERS[name], RunsAhead, seed, has_given=name in ("tokens", "balanced", "batches"))
        script.run()
        assert script.trained == script.expected, seed
        kills += script.kills
    assert kills > 30

"""A training script, killed and started again at random, and the samples that count in each of its epochs."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["EPOCHS", "RunsAhead", "Script", "flat"]

EPOCHS = 3


def flat(items: Any) -> list[int]:
    """Samples of batches, or of samples."""
    return [index for item in items for index in torch.as_tensor(item).view(-1).tolist()]


class RunsAhead:
    """A `DataLoader` that asks the sampler for some batches before the first one is taken, as one with workers does.

    Args:
        sampler: of batches if `batch_size` is None.
        ahead: batches that it has asked for and not given.
    """

    def __init__(self, sampler: Any, batch_size: int | None, ahead: int) -> None:
        self.batch_sampler = sampler if batch_size is None else None
        self.sampler, self.batch_size, self._ahead = sampler, batch_size, ahead

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._batches()
        waiting = list(itertools.islice(batches, self._ahead))
        return self._rest(waiting, batches)

    def _rest(self, waiting: list[list[int]], batches: Iterator[list[int]]) -> Iterator[list[int]]:
        for batch in batches:
            waiting.append(batch)
            yield waiting.pop(0)
        yield from waiting

    def _batches(self) -> Iterator[list[int]]:
        samples = iter(self.sampler)
        if self.batch_size is None:
            yield from samples
            return
        while batch := list(itertools.islice(samples, self.batch_size)):
            yield batch


class Script:
    """What it does is drawn when it is made: how it counts, looks, evaluates, breaks off, saves and is killed.

    Args:
        make: a sampler.
        load: (sampler, batch_size, batches asked for ahead) to a loader; batch_size None: the sampler's batches.
        seed: decides what happens.
        has_given: whether `state_dict` of the sampler takes `given`.

    Attributes:
        trained: by epoch, the samples that count: after a kill those up to the last save.
        expected: those of an epoch of a run that is never killed.
    """

    def __init__(
        self, make: Callable[[], Any], load: Callable[[Any, int | None, int], Any], seed: int, has_given: bool
    ) -> None:
        self._random = rng = random.Random(seed)
        self._make = make
        self._counts_by = rng.choice(["track", "track", "given" if has_given else "track", "position"])
        self._sets_epoch = rng.random() < 0.7
        by_batch = isinstance(next(iter(make())), list)
        self._batch_size = None if by_batch else rng.randint(1, 9)
        ahead = 0 if self._counts_by == "position" else rng.choice([0, 1, 3, 100])
        self._load = lambda sampler: load(sampler, self._batch_size, ahead)
        self.expected = [flat(self._whole(epoch)) for epoch in range(EPOCHS)]
        self.trained: list[list[int]] = [[] for _ in range(EPOCHS)]
        self._saved: tuple[int, int, dict[str, Any] | None, list[list[int]]] = 0, 0, None, copy.deepcopy(self.trained)
        self.kills = 0

    def run(self) -> None:
        """Start it until it has come to its end."""
        while not self._start():
            self.kills += 1
            self.trained = copy.deepcopy(self._saved[3])

    def _whole(self, epoch: int) -> list[Any]:
        sampler = self._make()
        if self._sets_epoch:
            sampler.set_epoch(epoch)
        return list(sampler)

    def _start(self) -> bool:
        """Returns False if it was killed."""
        first, used, state, _ = self._saved
        sampler = self._make()
        loader = self._load(sampler)
        if state is not None:
            sampler.load_state_dict(state)
        self._look(loader)
        for epoch in range(first, EPOCHS):
            if self._sets_epoch:
                sampler.set_epoch(epoch)
            self._look(loader)
            if not self._train(sampler, loader, epoch, used):
                return False
            used = 0
            if self._sets_epoch and self._random.random() < 0.5:
                sampler.set_epoch(epoch + 1)
                self._save(epoch + 1, 0, sampler.state_dict())
        return True

    def _train(self, sampler: Any, loader: Any, epoch: int, used: int) -> bool:
        rng, total = self._random, len(self._whole(epoch))
        killed = rng.random() < 0.5
        for batch in sampler.track(loader) if self._counts_by == "track" else loader:
            self.trained[epoch] += flat(batch)
            used = min(used + (self._batch_size or 1), total)
            if self._counts_by != "position":
                self._look(loader)
            if rng.random() < 0.3:
                state = sampler.state_dict(given=used) if self._counts_by == "given" else sampler.state_dict()
                self._save(epoch, used, state)
            if killed and rng.random() < 0.1:
                return False
        return True

    def _look(self, loader: Any) -> None:
        """At a batch, or all of them. One that takes all ends an epoch if neither `track` nor `set_epoch` is used."""
        if self._random.random() < 0.3 and (self._sets_epoch or self._counts_by == "track"):
            list(itertools.islice(loader, self._random.choice([1, 2, 1000])))

    def _save(self, epoch: int, used: int, state: dict[str, Any]) -> None:
        self._saved = epoch, used, copy.deepcopy(state), copy.deepcopy(self.trained)

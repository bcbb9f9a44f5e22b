"""`Resharded`: makes any sampler elastic; the rest of an epoch is redistributed when the number of ranks changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bagua.elastic.sampler_base import ElasticSampler
from bagua.sampling import checked_count

__all__ = ["Resharded"]

_History = tuple[tuple[int, int], ...]  # (ranks, items that each has used), of an epoch


class Resharded(ElasticSampler[_History]):
    """Wraps samplers that plan an epoch for a certain number of ranks, such as those of `bagua.data`.

        def make(indices, num_replicas, rank):
            subset = [lengths[i] for i in indices]
            return TokenBudgetBatchSampler(subset, 4000, num_replicas=num_replicas, rank=rank)

        sampler = bagua.elastic.Resharded(make, len(lengths))
        loader = DataLoader(texts, batch_sampler=sampler)

    The state is how many items ranks have used, and how many ranks there were. From it, what they have seen is found by
    making their samplers again; the samples that are left are given to `make` for the ranks that there are now. So no
    sample comes twice or is left out, but for what the samplers themselves repeat or drop at the end of an epoch. An
    iteration begins at the start of the epoch, or where a loaded state was taken; its length does not change.

    Args:
        make: (indices, num_replicas, rank) to a sampler, or a batch sampler, over `range(len(indices))`, which has
            `set_epoch`. It must depend on nothing else.
        num_samples: in the data.
        num_replicas, rank: None takes them from `torch.distributed`, or from a fault-tolerant module as `Sampler` does.

    Attributes:
        epoch: given to `set_epoch` of the samplers.

    Raises:
        ValueError, RuntimeError: an argument is wrong; names it.

    Examples:
        >>> from bagua.data import TokenBudgetBatchSampler
        >>> lengths = [5, 9, 3, 7, 4, 8]
        >>> def make(indices, num_replicas, rank):
        ...     subset = [lengths[i] for i in indices]
        ...     return TokenBudgetBatchSampler(subset, 20, num_replicas=num_replicas, rank=rank)
        >>> sampler = bagua.elastic.Resharded(make, len(lengths))
        >>> sorted(index for batch in sampler for index in batch)
        [0, 1, 2, 3, 4, 5]
    """

    def __init__(
        self,
        make: Callable[[Sequence[int], int, int], Any],
        num_samples: int,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
            raise ValueError(f"num_samples: expected an integer >= 1, got {num_samples!r}")
        super().__init__((), num_replicas, rank)
        self._make, self.num_samples = make, num_samples
        self._planned: tuple[tuple[int, _History, tuple[int, int]], tuple[Sequence[int], Any]] | None = None

    def _left(self, start: _History) -> int:
        indices, sampler = self._current(start)
        return max(len(list(sampler)) - self._here(start), 0) if indices else 0

    def _give(self, start: _History) -> Iterator[Any]:
        indices, sampler = self._current(start)
        for item in list(sampler)[self._here(start) :] if indices else []:
            yield [indices[each] for each in item] if isinstance(item, list | tuple) else indices[item]

    def _after(self, start: _History, num: int, whole: bool) -> _History:
        past = start[:-1] if self._goes_on(start) else start
        return (*past, (self.num_replicas, self._here(start) + num))

    def state_dict(self) -> dict[str, Any]:
        """Epoch, and what has been used; equal on all ranks.

        Logs a warning where it may count what workers of a loader have fetched (see `track`).
        """
        self._warn_if_ahead()
        return {"epoch": self.epoch, "num_samples": self.num_samples, "history": [list(each) for each in self._at]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the next iteration where `state` was taken, by any number of ranks.

        Raises:
            ValueError: it was taken with other data, or of another kind of sampler. Or it is damaged.
        """
        if "history" not in state:
            raise ValueError("sampler: the state is not of a Resharded; it has no history")
        if state.get("num_samples") != self.num_samples:
            raise ValueError(f"sampler: num_samples was {state.get('num_samples')!r} and is {self.num_samples}")
        epoch, what = checked_count("sampler: epoch of the state", state.get("epoch")), "sampler: history of the state"
        history = state["history"]
        pairs = isinstance(history, list | tuple) and all(isinstance(each, list | tuple) for each in history)
        if not pairs or any(len(each) != 2 for each in history):
            raise ValueError(f"{what}: expected pairs of numbers, got {history!r}")
        place = tuple((checked_count(what, size), checked_count(what, num)) for size, num in history)
        self.epoch = epoch
        self._go_to(place)

    def _here(self, history: _History) -> int:
        return history[-1][1] if self._goes_on(history) else 0

    def _goes_on(self, history: _History) -> bool:
        """Whether the last entry is of as many ranks as there are now, so that its plan is still in use."""
        return bool(history) and history[-1][0] == self.num_replicas

    def _current(self, history: _History) -> tuple[Sequence[int], Any]:
        """The samples that these ranks began with, and this rank's sampler of them."""
        past = history[:-1] if self._goes_on(history) else history
        key = self.epoch, past, self._ranks.now
        if self._planned is None or self._planned[0] != key:
            left: Sequence[int] = range(self.num_samples)
            for size, num in past:
                seen: set[int] = set()
                for rank in range(size):
                    for item in list(self._sampler(left, size, rank))[:num]:
                        seen.update(item if isinstance(item, list | tuple) else [item])
                left = [index for at, index in enumerate(left) if at not in seen]
            sampler = self._sampler(left, self.num_replicas, self.rank) if left else None
            self._planned = key, (left, sampler)
        return self._planned[1]

    def _sampler(self, indices: Sequence[int], size: int, rank: int) -> Any:
        sampler = self._make(indices, size, rank)
        sampler.set_epoch(self.epoch)
        return sampler

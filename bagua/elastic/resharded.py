"""`Resharded`: makes any sampler elastic; the rest of an epoch is redistributed when the number of ranks changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from bagua.elastic.sampler_base import ElasticSampler, track

__all__ = ["Resharded"]

_T = TypeVar("_T")


class Resharded(ElasticSampler):
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
        super().__init__(num_replicas, rank)
        self._make, self.num_samples = make, num_samples
        self.epoch = self._begin = self._end = 0
        self._planned: tuple[tuple[int, int], tuple[Sequence[int], Any]] | None = None
        self._go_to([])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, which begins where a state of this epoch was loaded, if one was.

        Raises:
            ValueError: not an integer >= 0.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch: expected an integer >= 0, got {epoch!r}")
        self._go_to(_copy(self._loaded) if epoch == self.epoch else [])
        self.epoch, self._planned = epoch, None

    def __len__(self) -> int:
        """Items of this rank in an iteration, to the end of the epoch."""
        indices, sampler = self._current(self._start)
        return max(len(list(sampler)) - self._here(self._start), 0) if indices else 0

    def __iter__(self) -> Iterator[Any]:
        self._ranks.check_tracked()
        self.repeat_if_over()
        return self._items()

    def _items(self) -> Iterator[Any]:
        indices, sampler = self._current(self._start)
        items = list(sampler) if indices else []
        self._history = _copy(self._start)
        self._begin = begin = self._here(self._start)
        self._end = len(items)
        self._moved = self._moved or not items[begin:]  # an end that was loaded is iterated once, in vain
        for at in range(begin, len(items)):
            self._note(at + 1)
            self.untracked = at + 1 < len(items)
            yield _translate(items[at], indices)

    def track(self, loader: Iterable[_T]) -> Iterator[_T]:
        """The batches of a `DataLoader` that has this sampler, counted as used when the training has seen them."""
        return track(self, self._ranks, loader)

    def used(self, num: int) -> None:
        """Each rank has used `num` items since the iteration began."""
        self._note(self._begin + num)

    @property
    def over(self) -> bool:
        """Whether an iteration has come to the end of the epoch. Not if a position at the end was loaded."""
        return self._moved and self._here(self._history) >= self._end

    def go_on(self) -> None:
        """Begin the next iteration where this one is."""
        self._start = _copy(self._history)

    def repeat_if_over(self) -> None:
        """Begin the next iteration at the start of the epoch if one has come to its end."""
        if self.over:
            self._start = []

    def state_dict(self) -> dict[str, Any]:
        """Epoch, and what has been used; equal on all ranks."""
        return {"epoch": self.epoch, "num_samples": self.num_samples, "history": _copy(self._history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the next iteration where `state` was taken, by any number of ranks.

        Raises:
            ValueError: it was taken with other data, or of another kind of sampler.
        """
        if "history" not in state:
            raise ValueError("sampler: the state is not of a Resharded; it has no history")
        if state.get("num_samples") != self.num_samples:
            raise ValueError(f"sampler: num_samples was {state.get('num_samples')!r} and is {self.num_samples}")
        self.epoch, self._planned = state["epoch"], None
        self._go_to([[int(size), int(num)] for size, num in state["history"]])

    def _go_to(self, history: list[list[int]]) -> None:
        """Begin the next iteration there.

        Args:
            history: (ranks, items that each has used), of this epoch.
        """
        self._history, self._start, self._loaded = history, _copy(history), _copy(history)
        self._moved = self.untracked = False

    def _here(self, history: list[list[int]]) -> int:
        return history[-1][1] if self._goes_on(history) else 0

    def _goes_on(self, history: list[list[int]]) -> bool:
        """Whether the last entry is of as many ranks as there are now, so that its plan is still in use."""
        return bool(history) and history[-1][0] == self.num_replicas

    def _note(self, num: int) -> None:
        if self._goes_on(self._history):
            self._history[-1][1] = num
        else:
            self._history.append([self.num_replicas, num])
        self._moved, self.untracked = True, False

    def _current(self, history: list[list[int]]) -> tuple[Sequence[int], Any]:
        """The samples that these ranks began with, and this rank's sampler of them."""
        past = history[:-1] if self._goes_on(history) else history
        key = self.epoch, len(past)
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


def _copy(history: list[list[int]]) -> list[list[int]]:
    return [list(each) for each in history]


def _translate(item: Any, indices: Sequence[int]) -> Any:
    return [indices[each] for each in item] if isinstance(item, list | tuple) else indices[item]

"""Base of all samplers of Bagua: where an iteration begins, and how far the training is in the epoch."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch.utils.data import Sampler

__all__ = ["Resumable", "checked_count"]

_log = logging.getLogger("bagua")
_T = TypeVar("_T")
_Batch = TypeVar("_Batch")
_Place = TypeVar("_Place")


class Resumable(Sampler[_T], Generic[_T, _Place]):
    """A sampler of one rank whose epochs can be resumed.

    An iteration begins at the start of the epoch, or at the position that was loaded, whatever an earlier one that was
    not finished has been given. One that was given all may have been a look at a batch, for which workers have fetched
    the rest: so what was loaded stays until `set_epoch` is called, if it ever is. Else the next iteration repeats the
    epoch from its start. The end of a tracked loop is certain. Lengths do not change in an iteration.

    Subclasses say with `_left`, `_give` and `_after` what a position is; it is never changed in place.

    Args:
        origin: position of the start of an epoch.

    Attributes:
        epoch: the number that, with the seed, decides the order.
        epochs_set: how often it was set.
    """

    def __init__(self, origin: _Place) -> None:
        self.epoch = self.epochs_set = 0
        self._origin = origin
        self._iterations = 0
        self._warned = False
        self._tracked = False  # from the first `track` on, iterations outside it do not count
        self._go_to(origin)

    def _left(self, start: _Place) -> int:
        """Items of this rank from there to the end of the epoch."""
        raise NotImplementedError

    def _give(self, start: _Place) -> Iterator[_T]:
        """These items."""
        raise NotImplementedError

    def _after(self, start: _Place, num: int, whole: bool) -> _Place:
        """The position when each rank has used `num` items from `start` on; `whole`: all that were left."""
        raise NotImplementedError

    def _go_to(self, place: _Place) -> None:
        """Begin the next iteration there: at a position that was loaded, or at the start of an epoch."""
        self._at = self._loaded = place
        self._ends = 0  # of untracked iterations since
        self._ahead = False  # whether the position may count what workers of a loader have fetched
        self._begin(place)

    def _begin(self, place: _Place) -> int:
        """Begin an iteration there; it counts while the number that is returned is that of the last one."""
        self._start = place
        self._total: int | None = None  # items from there on, once it is needed
        self._over = False
        self._iterations += 1
        return self._iterations

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, which begins where a state of this epoch was loaded, if one was.

        Raises:
            ValueError: not an integer >= 0.
        """
        checked_count("epoch", epoch)
        self._go_to(self._loaded if epoch == self.epoch else self._origin)
        self.epoch = epoch
        self.epochs_set += 1

    def _take_epoch(self) -> None:
        """For subclasses whose epoch may have been set at another sampler."""

    def __len__(self) -> int:
        """Items of this rank in an iteration, to the end of the epoch."""
        self._take_epoch()
        return self._left(self._start)

    def __iter__(self) -> Iterator[_T]:
        self._take_epoch()
        if not self._tracked:
            self._begin(self._next())  # of this length
        return self._iterate()

    def _iterate(self) -> Iterator[_T]:
        self._take_epoch()
        start = self._next()
        mine = 0
        if not self._tracked:
            if self._ends == 2 and self.epochs_set and start != self._origin:
                _log.warning(
                    "sampler: the rest of epoch %d, which was loaded, is iterated for the third time; call set_epoch "
                    "for the next epoch",
                    self.epoch,
                )
            self._ahead = self._ahead or _may_fetch_ahead()
            self._at, mine = start, self._begin(start)
            self._end_if(self._left(start) == 0)
        for number, item in enumerate(self._give(start), 1):
            if mine == self._iterations:
                self.used(number)
                self._end_if(self._over)
            yield item

    def _end_if(self, over: bool) -> None:
        """Note whether an untracked iteration has been given all."""
        self._over = over
        self._ends += over

    def track(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """The batches of a `DataLoader` that has this sampler, with the position set to what they have used up.

        A loader with workers asks the sampler for more than the training has seen; without this, a checkpoint counts
        that as used. Other iterations, for an evaluation say, do not count from then on.

        Raises:
            TypeError: the loader does not draw from the sampler.
        """
        return self._track(loader, self._items_per_batch(loader))

    def _track(self, loader: Iterable[_Batch], items_per_batch: int) -> Iterator[_Batch]:
        self._take_epoch()
        # What iterations outside `track` have used up until now was not training.
        self._at = start = self._next() if self._tracked else self._loaded
        self._ahead = False
        self._tracked, mine, total = True, self._begin(start), len(self)
        for number, batch in enumerate(loader, 1):
            if mine == self._iterations:
                self.used(min(number * items_per_batch, total))
            yield batch
        if mine == self._iterations:
            self.used(total)  # a loader with drop_last leaves some out

    def _items_per_batch(self, loader: Any) -> int:
        if getattr(loader, "batch_sampler", None) is self:
            return 1
        if getattr(loader, "sampler", None) is not self:
            raise TypeError(f"loader: a {type(loader).__name__} that does not draw from this sampler")
        return getattr(loader, "batch_size", None) or 1  # without batches: one sample at a time

    def used(self, num: int) -> None:
        """Set the position to where each rank has used `num` items since the iteration began."""
        if self._total is None:
            self._total = self._left(self._start)
        self._over = num >= self._total
        self._at = self._after(self._start, num, self._over)

    def _warn_if_ahead(self, remedy: str = "") -> None:
        """Warn once if the position may be ahead of the training. After the last item, the loop may have ended."""
        if self._ahead and not self._warned and (not self._over or _may_fetch_ahead()):
            self._warned = True
            _log.warning(
                "sampler: epoch %d is iterated outside track, so its state counts batches that workers of the loader "
                "have fetched as used, and they are left out after a resume: iterate with sampler.track(loader)%s",
                self.epoch,
                remedy,
            )

    @property
    def over(self) -> bool:
        """Whether an iteration has come to the end of the epoch. Not if a position at the end was loaded."""
        return self._over

    def go_on(self) -> None:
        """Begin the next iteration at the position. An epoch that is over stays so."""
        over = self._over
        self._begin(self._at)
        self._over = over

    def _next(self) -> _Place:
        """Where the next iteration begins."""
        return self._origin if self._over and (self._tracked or not self.epochs_set) else self._start


def _may_fetch_ahead() -> bool:
    """Whether there are processes that may be workers of a `DataLoader`."""
    return any(process.daemon for process in multiprocessing.active_children())


def checked_count(name: str, value: Any) -> int:
    """Return `value` if it is an integer >= 0.

    Raises:
        ValueError: it is not; names it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}: expected an integer >= 0, got {value!r}")
    return value

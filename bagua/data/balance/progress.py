"""Epoch, rank and position of a sampler, and resuming in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from bagua.sampling import Resumable, checked_count

__all__ = ["Progress", "check_flag", "check_seed", "check_share"]

_T = TypeVar("_T")


class Progress(Resumable[_T, int]):
    """A sampler of one rank whose position is how many items of the epoch each rank has used.

    Subclasses give an epoch's items with `_items` and what must not differ on resuming with `_circumstances`.
    """

    def __init__(self) -> None:
        super().__init__(0)

    def _items(self) -> Sequence[_T]:
        raise NotImplementedError

    def _circumstances(self) -> dict[str, Any]:
        raise NotImplementedError

    def _left(self, start: int) -> int:
        return max(len(self._items()) - start, 0)

    def _give(self, start: int) -> Iterator[_T]:
        items = self._items()
        for at in range(start, len(items)):
            yield items[at]

    def _after(self, start: int, num: int, whole: bool) -> int:
        return start + num

    def state_dict(self, given: int | None = None) -> dict[str, Any]:
        """Position in this epoch; equal on all ranks.

        Args:
            given: how many items of the epoch the training has used, from its start. None takes what `track` has
                counted; outside `track` those given out, which are more when a DataLoader's workers run ahead. That
                logs a warning.

        Raises:
            ValueError: `given` is negative or more than there are.
        """
        self._take_epoch()
        if given is None:
            self._warn_if_ahead(", or pass `given` to state_dict")
        count = len(self._items())
        position = self._at if given is None else given
        if not 0 <= position <= count:
            raise ValueError(f"given: expected 0 to {count}, got {position}")
        return {"epoch": self.epoch, "position": position, **self._circumstances()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the next iteration where `state` was taken. It is empty if that was the end of an epoch.

        Raises:
            ValueError: it was taken with other data, options or another number of ranks; names what differs. Or it is
                damaged.
        """
        for name, value in self._circumstances().items():
            if state.get(name) != value:
                raise ValueError(f"state: {name} was {state.get(name)!r} and is {value!r}")
        epoch, position = (checked_count(f"state: {name}", state.get(name)) for name in ("epoch", "position"))
        self.epoch = epoch
        self._go_to(position)


def check_share(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Number of ranks and rank; None takes them from `torch.distributed`.

    Raises:
        RuntimeError: it is needed and not initialised.
        ValueError: out of range.
    """
    if num_replicas is None or rank is None:
        group: Any = torch.distributed
        if not group.is_available() or not group.is_initialized():
            raise RuntimeError("num_replicas and rank: give both, or call bagua.init_process_group() first")
        num_replicas = group.get_world_size() if num_replicas is None else num_replicas
        rank = group.get_rank() if rank is None else rank
    assert num_replicas is not None and rank is not None
    if num_replicas < 1:
        raise ValueError(f"num_replicas: expected 1 or more, got {num_replicas}")
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank: expected 0 to {num_replicas - 1}, got {rank}")
    return num_replicas, rank


def check_flag(name: str, value: Any) -> bool:
    """Return `value` if it is a bool, else raise a TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")
    return value


def check_seed(seed: Any) -> int:
    """Return `seed` if it is an integer, else raise a TypeError."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: expected an int, got {type(seed).__name__}")
    return seed

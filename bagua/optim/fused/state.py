"""`optimizer.state` of a fused optimizer: for each parameter what the unfused one would have."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["StateView"]


class StateView(defaultdict[Any, Any]):
    """A dict of state by parameter, updated lazily when read.

    Tensors in the slots are views of the flat ones, so they are always live. Plain numbers and one-element tensors
    (`step`) are written when the view is read. What is put in from outside is taken over at the next step.
    Copies and pickles are plain dicts.

    Args:
        refresh: a bound method that writes the slots.

    Attributes:
        touched: whether somebody has looked, and may have changed something, since this was set to False.
    """

    def __init__(self, refresh: Callable[[], None]) -> None:
        super().__init__(dict)
        self._refresh = weakref.WeakMethod(refresh)
        self.touched = False

    def look(self) -> None:
        """Bring up to date."""
        self.touched = True
        refresh = self._refresh()
        if refresh is not None:
            refresh()

    def plain(self) -> dict[Any, Any]:
        """The slots as they are stored; the slots themselves are not copied."""
        return dict(zip(dict.keys(self), dict.values(self), strict=True))

    def raw_get(self, key: Any) -> Any:
        """What is stored, without bringing it up to date."""
        return dict.get(self, key)

    def raw_set(self, key: Any, slot: Any) -> None:
        """Store without counting as touched."""
        dict.__setitem__(self, key, slot)

    def raw_replace(self, slots: dict[Any, Any]) -> None:
        """Store these slots and no others."""
        dict.clear(self)
        dict.update(self, slots)

    def __reduce__(self) -> Any:
        self.look()
        return defaultdict, (dict, self.plain())

    def __copy__(self) -> defaultdict[Any, Any]:
        return self.copy()

    def copy(self) -> defaultdict[Any, Any]:
        """A plain dict of the same slots."""
        self.look()
        return defaultdict(dict, self.plain())

    def __iter__(self) -> Iterator[Any]:
        self.look()
        return super().__iter__()

    def __eq__(self, other: object) -> bool:
        self.look()
        return dict.__eq__(self, other)

    __hash__ = None  # type: ignore[assignment]


def _looking(name: str) -> Any:
    method = getattr(defaultdict, name)

    def call(self: StateView, *args: Any, **kwargs: Any) -> Any:
        self.look()
        return method(self, *args, **kwargs)

    call.__name__ = name
    call.__doc__ = method.__doc__
    return call


for _name in (
    "__contains__", "__delitem__", "__getitem__", "__len__", "__repr__", "__setitem__", "clear", "get", "items", "keys",
    "pop", "popitem", "setdefault", "update", "values",
):  # fmt: skip
    setattr(StateView, _name, _looking(_name))

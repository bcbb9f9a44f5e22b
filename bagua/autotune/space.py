"""The space of settings: a list of values for each thing that may be tuned, and which settings come to the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from bagua.autotune.settings import Settings

__all__ = ["Space"]


class Space:
    """All settings that differ from `default` in the given axes only.

    Args:
        default: what is used without tuning; always part of the space.
        axes: values by name of the attribute of `Settings`, in the order in which a search looks at them. The
            default's value is added where it lacks; numbers are sorted.
        effect: returns equal values for settings that make no difference, so that one of them is measured only.
    """

    def __init__(
        self,
        default: Settings,
        axes: Mapping[str, tuple[Any, ...]],
        effect: Callable[[Settings], Hashable] = lambda settings: settings,
    ) -> None:
        self.default = default
        self.effect = effect
        self.axes = {name: tuple(sorted({*values, getattr(default, name)})) for name, values in axes.items()}

    def line(self, settings: Settings, axis: str) -> list[Settings]:
        """`settings` with every value of one axis, in order."""
        return [replace(settings, **{axis: value}) for value in self.axes[axis]]

    @property
    def trivial(self) -> bool:
        """Whether no point differs in effect from the default."""
        same = self.effect(self.default)
        return all(self.effect(settings) == same for settings in self._points())

    def grid(self) -> list[Settings]:
        """All points, the default first, one of those that make no difference."""
        seen: dict[Hashable, Settings] = {}
        for settings in self._points():
            seen.setdefault(self.effect(settings), settings)
        return list(seen.values())

    def _points(self) -> Iterator[Settings]:
        yield self.default
        for values in product(*self.axes.values()):
            yield replace(self.default, **dict(zip(self.axes, values, strict=True)))

"""The protocol that every receiver of metrics implements."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from bagua.engine import Stats

__all__ = ["Callback", "Sink", "optional_package"]


class Sink:
    """Receives snapshots of a module's statistics. Derive from it for a receiver of your own, or pass a function.

    All methods are called in the training thread, between two steps, on the ranks that report. They must not
    communicate with other ranks. An exception of `write` or `close` is logged once, and training goes on.

    Examples:
        >>> class Printer(bagua.metrics.Sink):
        ...     def write(self, stats, since):
        ...         print(stats.steps - since.steps, "steps more")
        >>> report = bagua.metrics.report(model, to=Printer(), every=1)
        >>> model(inputs).sum().backward()
        >>> optimizer.step()
        1 steps more
        >>> report.close()
    """

    def __repr__(self) -> str:
        return type(self).__name__

    def open(self, rank: int, *, alone: bool) -> None:
        """Get ready to write. An exception is raised by `bagua.metrics.report`.

        Args:
            rank: of this process.
            alone: no other rank reports.
        """

    def write(self, stats: Stats, since: Stats) -> None:
        """Receive a snapshot.

        Args:
            stats: the newest.
            since: the previous one; at first the one of the moment when the report began.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release what `open` has acquired."""


class Callback(Sink):
    """A function that gets each snapshot of `bagua.stats`."""

    def __init__(self, function: Callable[[Stats], Any]) -> None:
        self._function = function

    def __repr__(self) -> str:
        return getattr(self._function, "__qualname__", None) or repr(self._function)

    def write(self, stats: Stats, since: Stats) -> None:
        """See `Sink`."""
        self._function(stats)


def optional_package(module: str, extra: str, user: str) -> Any:
    """Import a module of a package that an extra installs.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{user} needs {package}: pip install 'bagua[{extra}]'") from error

"""What is told of each completed training step, such as a report of metrics."""

from __future__ import annotations

from typing import Protocol

__all__ = ["StepListener", "StepListeners"]


class StepListener(Protocol):
    """Receives the training steps of a module, in the training thread."""

    def step_ended(self, step: int) -> None:
        """`step` training steps are complete. An exception ends training on this rank."""

    def engine_ends(self, *, replaced: bool) -> None:
        """The last moment to read this engine's statistics.

        Args:
            replaced: `bagua.distribute` puts an engine in its place, which counts from 0 and keeps the listeners.
                Otherwise the module becomes a plain one.
        """


class StepListeners:
    """The listeners of a module; engines that replace each other share them.

    Attributes:
        active: a tuple, so that a listener may remove itself while it is called.
    """

    def __init__(self) -> None:
        self.active: tuple[StepListener, ...] = ()

    def add(self, listener: StepListener) -> None:
        """Call `listener` from now on."""
        self.active = (*self.active, listener)

    def remove(self, listener: StepListener) -> None:
        """Stop calling `listener`; no effect if it is not called."""
        self.active = tuple(each for each in self.active if each is not listener)

"""Optimizer steps with gradients that no synchronised backward pass has made, so that no rank averages them."""

from __future__ import annotations

from bagua.algorithms.base import Payload
from bagua.engine.discarded_passes import holds_gradients
from bagua.engine.parts import TrainingParts

__all__ = ["StepsWithoutPasses"]

_STEPS = 3  # in a row; fewer come with optimizers that step once more, or seldom


class StepsWithoutPasses:
    """Warns of gradients that a script sets by hand, as with `torch.func`."""

    def __init__(self, training: TrainingParts) -> None:
        self._state, self._team, self._inventory = training.state, training.team, training.inventory
        self._count = 0

    def step_had_pass(self) -> None:
        """A step ends that had a synchronised backward pass."""
        self._count = 0

    def step_had_none(self, *, averages_weights: bool) -> None:
        """A step ends without one, and not within `no_sync`.

        Args:
            averages_weights: the algorithm averages them in such a step, too.
        """
        own = self._state.algorithm.payload is Payload.GRAD or not averages_weights
        if not own or self._team.size == 1 or self._count >= _STEPS:
            return
        if not holds_gradients(list(self._inventory.trainable.values())):
            return
        self._count += 1
        if self._count == _STEPS:
            self._state.notice(
                f"the last {_STEPS} optimizer steps used gradients of no synchronised backward pass of the module: "
                "they were set by hand, as with torch.func or torch.autograd.grad, or all passes ran within "
                "bagua.no_sync. Bagua averages nothing in such steps, so the weights of the ranks will differ unless "
                "your code averages the gradients; call the module and backward()",
                urgent=self._team.rank == 0,
            )

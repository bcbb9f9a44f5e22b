"""Backward passes whose gradients a script throws away, as that of a generator's loss through the discriminator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bagua.algorithms.base import Payload
from bagua.engine.parts import ExchangeParts, TrainingParts
from bagua.engine.reducer.unused_feedback import Withheld

__all__ = ["DiscardedPasses", "holds_gradients"]

# Steps without a discarded pass after which no further one is expected, as a gradient scaler skips one in 2000. A
# generator and a discriminator that take turns in shorter phases are undone.
_QUIET = 128


class DiscardedPasses:
    """Puts back what error feedback and momenta held before a pass whose gradients never reached an optimizer.

    Otherwise the next pass sends what was lost of gradients that do not count. That a module has such passes is known
    after the first one only, which is not undone, unless it comes before the first step: a gradient scaler, whose scale
    is not known yet, often skips that one. From then on there is a copy before each pass that is the first one after a
    step, until `_QUIET` steps have passed without a discarded pass.

    Attributes:
        seen: there was such a pass lately.
    """

    def __init__(self, training: TrainingParts, exchanges: ExchangeParts) -> None:
        self._state, self._names = training.state, list(training.inventory.trainable)
        self._memory, self._dispatcher, self._pool = exchanges.memory, exchanges.dispatcher, exchanges.pool
        self._copies = Withheld()
        self.seen = self._held = False
        self._stepped = False  # with what is kept now
        self._quiet = 0  # steps since the last such pass
        self._fresh = False  # there was no state when the pass began, so `_copies` has none

    def pass_begins(self) -> None:
        """A pass begins whose gradients may be thrown away, and there are no others since the last step."""
        if (self.seen or not self._stepped) and self._is_of_passes():
            self._hold()

    def was_discarded(self) -> None:
        """A further pass begins, and nothing is left of the gradients of the one before."""
        self.seen, self._quiet = True, 0
        if self._held and self._is_of_passes():
            if self._fresh:
                self._dispatcher.renew()
            self._copies.put_back(self._names)

    def step_ends(self) -> None:
        """The gradients have reached the optimizers."""
        self._forget()
        self._stepped = True
        self._quiet += 1
        self.seen = self.seen and self._quiet < _QUIET

    def state_is_loaded(self) -> None:
        """Another state is kept now than at the last pass."""
        self._forget()
        self._stepped = False

    def _forget(self) -> None:
        if self._held:
            self._copies.put_back(())
            self._held = False

    def _is_of_passes(self) -> bool:
        """Whether what is kept belongs to passes: where weights are exchanged, it is of steps, and in use meanwhile."""
        return self._state.algorithm.payload is Payload.GRAD

    def _hold(self) -> None:
        buckets = self._state.buckets
        self._copies.hold(self._memory, self._dispatcher, self._pool.groups, buckets, self._names)
        self._held, self._fresh = True, not buckets


@torch.no_grad()
def holds_gradients(
    params: Sequence[nn.Parameter], first: int = -1, *, finite: bool = False, read: bool = True
) -> bool:
    """Whether there are gradients, to which a pass that begins now adds.

    Args:
        params: the trainable parameters.
        first: of them, the one whose gradient has already been accumulated; -1: none.
        finite: only if all of them are.
        read: tensors of zeros are none; they are read, for which a device must be waited for.
    """
    found = [param.grad for index, param in enumerate(params) if index != first and param.grad is not None]
    if finite and not all(bool(gradient.isfinite().all()) for gradient in found):
        return False
    return any(bool(gradient.any()) for gradient in found) if read else bool(found)

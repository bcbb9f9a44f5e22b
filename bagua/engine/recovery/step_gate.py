"""Begins a step before its batch is chosen, so that it is divided among the ranks that apply it."""

from __future__ import annotations

import weakref

from torch import nn

from bagua.engine.hooks import attachments
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.recovery.progress import Progress
from bagua.engine.step_tracker import StepTracker

__all__ = ["StepGate", "is_fault_tolerant"]


def is_fault_tolerant(module: nn.Module) -> bool:
    """Whether `module` was distributed with `fault_tolerant`."""
    return module in attachments and attachments[module].before_step is not None


class StepGate:
    """The steps of a fault-tolerant module, for a loop over batches. Called by the training thread, between batches.

    Args:
        module: distributed with `fault_tolerant`. Held weakly.

    Raises:
        ValueError: `module` is not distributed any more (all attributes and methods).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def progress(self) -> Progress:
        """State of the loop, which travels with the weights."""
        return self._manager.progress

    @property
    def rank(self) -> int:
        """Of this process, among those whose groups are in use."""
        return attachments[self._find()].engine.team.rank

    @property
    def size(self) -> int:
        """Number of ranks whose groups are in use."""
        return attachments[self._find()].engine.team.size

    @property
    def ending(self) -> bool:
        """Whether the optimizers have stepped, and the exchange with which the step ends has yet to be made."""
        return self._tracker.ending

    @property
    def steps(self) -> int:
        """Steps that count."""
        return attachments[self._find()].engine.step

    @property
    def attempts(self) -> int:
        """Steps that have ended, lost ones included."""
        return self._manager.attempts

    def settle(self) -> bool:
        """Note the end of a step that not all optimizers made. Returns whether another step is in progress.

        It is, if its gradients are accumulated over several batches.
        """
        tracker = self._tracker
        if tracker.stepped and not tracker.nesting.inside:
            tracker.end_step()
        return tracker.forward_seen

    def begin(self) -> None:
        """Before the batch of a step is chosen: return when the step can begin. Opens new groups if the members change.

        From now on the step ends in the groups in which it has begun, or is lost.

        Raises:
            CommunicationError: training cannot go on.
        """
        module = self._find()
        before_step = attachments[module].before_step
        assert before_step is not None
        self.progress.repeats, self.progress.begun = True, False
        before_step(module)
        self.progress.begun = True

    @property
    def _manager(self) -> RecoveryManager:
        manager = attachments[self._find()].engine.failures.recovery
        assert manager is not None
        return manager

    @property
    def _tracker(self) -> StepTracker:
        return attachments[self._find()].engine.tracker

    def _find(self) -> nn.Module:
        module = self._module()
        if module is None or module not in attachments:
            raise ValueError("the module of this loop is not distributed any more")
        return module

"""Steps of a module's optimizers: nested ones, and those that evaluate a closure."""

from __future__ import annotations

from typing import Any

import torch

from bagua.algorithms.base import Payload
from bagua.comm.collectives import all_reduce_
from bagua.engine.nested_steps import Arguments, closure_in, with_closure
from bagua.engine.parts import ExchangeParts, TrainingParts
from bagua.engine.reducer.reducer import Reducer
from bagua.engine.step_tracker import StepTracker

__all__ = ["OptimizerSteps"]


class OptimizerSteps:
    """Receives each optimizer's step and reports the begin and end of a training step to the tracker."""

    def __init__(
        self, training: TrainingParts, exchanges: ExchangeParts, reducer: Reducer, tracker: StepTracker
    ) -> None:
        self._state, self._team, self._optimizers = training.state, training.team, training.optimizers
        self._pool, self._dispatcher = exchanges.pool, exchanges.dispatcher
        self._reducer, self._tracker = reducer, tracker
        self._begins_later = False  # this step: when its closure has been evaluated

    def begins(
        self, number: int, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Before a step of optimizer `number`; returns the arguments that it is to get instead, or None.

        Raises:
            RuntimeError: it steps within a backward pass.
        """
        tracker = self._tracker
        if not tracker.nesting.enter():
            return None  # a part of another's step
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{type(optimizer).__name__} steps within the backward pass, before gradients have been exchanged "
                "(_apply_optimizer_in_backward, or a hook that calls step()); step after backward() instead"
            )
        closure = closure_in(args, kwargs)
        if closure is not None and tracker.fault_tolerant:
            tracker.nesting.leave()
            raise RuntimeError(
                f"{type(optimizer).__name__} steps with a closure, which a fault-tolerant module cannot repeat after a "
                "loss; call backward() before step()"
            )
        if closure is None:
            tracker.step_begins()
            return None
        if number in tracker.stepped:
            tracker.end_step()  # not all optimizers made a step, and the next forward pass comes within this one
        if isinstance(optimizer, torch.optim.LBFGS):
            return self._begin_search(optimizer, args, kwargs, closure)
        if tracker.forward_told:
            tracker.step_begins()
            return None
        # The passes of this step come with the closure: what it has launched then is taken over after it.
        tracker.end_backward()
        self._begins_later = True
        return with_closure(args, kwargs, closure, self._evaluated)

    def ends(self, number: int) -> None:
        """After a step of optimizer `number`."""
        tracker = self._tracker
        if tracker.nesting.leave():
            self._begins_later = False
            tracker.stepped.add(number)
            if len(tracker.stepped) >= len(self._optimizers.alive) and not self._optimizers.expects_more:
                tracker.end_step()

    def _evaluated(self, loss: Any) -> Any:
        if self._begins_later:
            self._begins_later = False
            self._tracker.step_begins()
        return loss

    def _begin_search(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], closure: Any
    ) -> Arguments | None:
        """Begin a step that evaluates its closure several times (line search).

        With weights, the ranks search apart: whatever is to change weights does so before. With gradients, they must
        search alike, so that all of them see one loss.
        """
        tracker = self._tracker
        if self._state.algorithm.payload is Payload.PARAM:
            if self._team.size > 1:
                self._state.notice(
                    f"{type(optimizer).__name__} with {self._state.algorithm.name!r}: each rank searches with its own "
                    "loss, from weights that are not those of its history, so training can diverge; use "
                    "'gradient_allreduce', with which all ranks search alike",
                    urgent=True,
                )
            if not tracker.forward_told:
                tracker.forward_begins()
            tracker.step_begins()
            return None
        tracker.step_begins()
        return with_closure(args, kwargs, closure, self._loss_of_all) if self._team.size > 1 else None

    @torch.no_grad()
    def _loss_of_all(self, loss: Any) -> Any:
        if not self._reducer.is_to_sync():
            return loss
        if self._tracker.joining is not None:
            raise RuntimeError("join: LBFGS needs the losses of all ranks, and some have run out of inputs")
        total = torch.as_tensor(loss, dtype=torch.float64).detach().to(self._pool.device).reshape(1).clone()
        with self._dispatcher.side_exchange("losses") as group:
            all_reduce_(group, total, "sum")
        if getattr(self._state.algorithm, "average", True):
            total /= self._team.size
        return total[0]

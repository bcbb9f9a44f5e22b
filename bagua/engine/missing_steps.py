"""Weights that change although no optimizer steps: a step that hooks do not see."""

from __future__ import annotations

from bagua.algorithms.base import Payload
from bagua.engine.reducer.pass_watch import PassWatch
from bagua.engine.training_state import TrainingState

__all__ = ["look_for_steps", "tell_of_copied_weights"]


def look_for_steps(watch: PassWatch, state: TrainingState) -> None:
    """Check whether the weights keep changing although no optimizer steps.

    Raises:
        RuntimeError: they do, and the algorithm acts when a step ends.
    """
    changes = watch.look()
    if not changes:
        return
    what = (
        f"the parameters changed before {changes} backward passes in a row and no torch.optim.Optimizer made a "
        f"step: {state.algorithm.name!r} has seen no step since step {state.step}"
    )
    if not (state.schedule or state.algorithm.needs_steps):
        state.notice(what)
        return
    raise RuntimeError(
        f"{what}, so the ranks' weights would diverge; step with a torch optimizer, or pass optimizers=[] to "
        "bagua.distribute() if you update the parameters yourself: a step then ends with each backward pass"
    )


def tell_of_copied_weights(state: TrainingState, size: int) -> None:
    """At the end of a step that no optimizer has made: warn that averages can be overwritten.

    Not at the first one: the optimizer may be made later.
    """
    if size > 1 and state.step and state.algorithm.payload is Payload.PARAM:
        state.notice(
            f"optimizers=[]: {state.algorithm.name!r} writes averages into the module's parameters when a backward "
            "pass ends. Weights that your code then copies into them from elsewhere, as from fp32 master copies, "
            "overwrite the averages, and each rank trains alone: change the parameters in place, or use an algorithm "
            "that exchanges gradients",
            urgent=state.rank == 0,
        )

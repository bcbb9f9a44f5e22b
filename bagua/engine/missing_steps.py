"""Weights that change although no optimizer steps: a step that hooks do not see."""

from __future__ import annotations

from bagua.engine.reducer.pass_watch import PassWatch
from bagua.engine.training_state import TrainingState

__all__ = ["look_for_steps"]


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

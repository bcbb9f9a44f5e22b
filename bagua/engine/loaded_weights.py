"""Weights that `module.load_state_dict` has replaced between two steps, which algorithms with state of weights undo."""

from __future__ import annotations

from bagua.algorithms.base import Exactness, Payload
from bagua.engine.training_state import TrainingState

__all__ = ["tell_of_loaded_weights"]


def tell_of_loaded_weights(state: TrainingState) -> None:
    """Warn if weights were loaded since the last step, and the algorithm has state of those before."""
    loaded, state.loaded = state.loaded, False
    algorithm = state.algorithm
    if loaded and (algorithm.payload is Payload.PARAM or algorithm.exactness is Exactness.ASYNCHRONOUS):
        state.notice(
            f"the model's weights were loaded in mid-training, and {algorithm.name} keeps state of those before "
            "(anchors, momentum, replicas or moments), which pulls them back; load its state of the same step "
            "too, with bagua.load_state_dict(), or call bagua.detach() and bagua.distribute() again",
            urgent=True,
        )

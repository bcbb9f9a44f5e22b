"""Weights that `load_state_dict` has replaced between two steps, which algorithms with state of weights undo."""

from __future__ import annotations

from bagua.algorithms.base import Payload
from bagua.algorithms.mean_moments import sum_of_bits
from bagua.engine.training_state import TrainingState

__all__ = ["note_load", "tell_of_loaded_weights", "weight_sums"]


def note_load(state: TrainingState) -> None:
    """Before weights are loaded: keep a sum of what they are. Before the first step nothing needs to be told."""
    if state.step and state.before_load is None and state.algorithm.payload is Payload.PARAM:
        state.before_load = weight_sums(state)


def tell_of_loaded_weights(state: TrainingState) -> None:
    """Warn if weights were loaded since the last step that are others, and the algorithm has state of those before."""
    before, state.before_load = state.before_load, None
    if before is not None and state.algorithm.payload is Payload.PARAM and before != weight_sums(state):
        state.notice(
            f"the model's weights were loaded in mid-training, and {state.algorithm.name} keeps state of those before "
            "(anchors, momentum, replicas or moments), which pulls them back; load its state of the same step "
            "too, with bagua.load_state_dict(), or call bagua.detach() and bagua.distribute() again",
            urgent=True,
        )


def weight_sums(state: TrainingState) -> list[int]:
    """Of each bucket of weights the sum of its bits, as integers that wrap."""
    return [int(sum_of_bits(bucket.flat)) for bucket in state.buckets]

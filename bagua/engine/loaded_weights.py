"""Weights that `load_state_dict` has replaced between two steps, which algorithms with state of weights undo."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bagua.algorithms.base import Exactness, Payload
from bagua.engine.training_state import TrainingState

__all__ = ["note_load", "tell_of_loaded_weights", "weight_sums"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def note_load(state: TrainingState, params: Iterable[Tensor]) -> None:
    """Before weights are loaded: keep a sum of what they are. Before the first step nothing needs to be told."""
    state.loaded_first |= not state.step
    if state.step and state.before_load is None and _keeps_weights(state):
        state.before_load = weight_sums(params)


def tell_of_loaded_weights(state: TrainingState, params: Iterable[Tensor]) -> None:
    """Warn if weights were loaded since the last step that are others, and the algorithm has state of those before."""
    before, state.before_load = state.before_load, None
    if before is not None and _keeps_weights(state) and before != weight_sums(params):
        state.notice(
            f"the model's weights were loaded in mid-training, and {state.algorithm.name} keeps state of those before "
            "(anchors, momentum, replicas or moments), which pulls them back; load its state of the same step "
            "too, with bagua.load_state_dict(), or call bagua.detach() and bagua.distribute() again",
            urgent=True,
        )


def _keeps_weights(state: TrainingState) -> bool:
    algorithm = state.algorithm
    return algorithm.payload is Payload.PARAM or algorithm.exactness is Exactness.ASYNCHRONOUS


def weight_sums(params: Iterable[Tensor]) -> list[int]:
    """Of each tensor the sum of its bits, as integers that wrap."""
    flat = (param.detach().reshape(-1) for param in params)
    return [int(each.view(_BITS.get(each.element_size(), torch.uint8)).sum(dtype=torch.int64)) for each in flat]

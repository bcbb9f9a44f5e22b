"""Follows the training steps of a module and runs an algorithm's exchanges beside them."""

from __future__ import annotations

from bagua.engine.attach import detach, distribute, load_state_dict, no_sync, state_dict, stats
from bagua.engine.stats import Stats, StepStats

__all__ = ["Stats", "StepStats", "detach", "distribute", "load_state_dict", "no_sync", "state_dict", "stats"]

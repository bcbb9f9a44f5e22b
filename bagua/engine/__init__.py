"""Follows the training steps of a module and runs an algorithm's exchanges beside them."""

from __future__ import annotations

from bagua.engine.attach import abort, average, detach, distribute, load_state_dict, no_sync, resume, state_dict, stats
from bagua.engine.joining import join
from bagua.engine.quality import Guard, Quality
from bagua.engine.scaler import GradScaler
from bagua.engine.stats import Series, Stats, StepStats

__all__ = [
    "GradScaler",
    "Guard",
    "Quality",
    "Series",
    "Stats",
    "StepStats",
    "abort",
    "average",
    "detach",
    "distribute",
    "join",
    "load_state_dict",
    "no_sync",
    "resume",
    "state_dict",
    "stats",
]

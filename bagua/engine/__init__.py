"""The training engine: follows a module's training steps and runs the algorithm's exchanges alongside."""

from __future__ import annotations

from bagua.engine.api import detach, distribute
from bagua.engine.distributed_module import (
    average_parameters,
    load_state_dict,
    no_sync,
    pause,
    resume,
    state_dict,
    stats,
)
from bagua.engine.earlier_names import abort, average
from bagua.engine.grad_scaler import GradScaler
from bagua.engine.guard import Guard, Quality
from bagua.engine.join import join
from bagua.engine.module_state import module_state_dict
from bagua.engine.recovery.change import MembershipChange
from bagua.engine.recovery.options import FaultTolerance
from bagua.engine.stats import Series, Stats, StepStats

__all__ = [
    "FaultTolerance",
    "GradScaler",
    "Guard",
    "MembershipChange",
    "Quality",
    "Series",
    "Stats",
    "StepStats",
    "abort",
    "average",
    "average_parameters",
    "detach",
    "distribute",
    "join",
    "load_state_dict",
    "module_state_dict",
    "no_sync",
    "pause",
    "resume",
    "state_dict",
    "stats",
]

"""Parts of an engine that are passed on together."""

from __future__ import annotations

from dataclasses import dataclass

from bagua.comm.team import Team
from bagua.engine.algorithm_memory import AlgorithmMemory
from bagua.engine.context import EngineContext
from bagua.engine.failures import Failures
from bagua.engine.followed_optimizers import FollowedOptimizers
from bagua.engine.lanes.dispatcher import Dispatcher
from bagua.engine.lanes.pool import LanePool
from bagua.engine.startup.inventory import Inventory
from bagua.engine.training_state import TrainingState

__all__ = ["ExchangeParts", "TrainingParts"]


@dataclass(frozen=True)
class TrainingParts:
    """What is trained, and by which ranks.

    Attributes:
        key: a name that is new for the team and equal on all ranks.
        state: algorithm, buckets, step: what changes.
        inventory: the module's tensors.
        team: the ranks.
        optimizers: those whose steps count.
    """

    key: str
    state: TrainingState
    inventory: Inventory
    team: Team
    optimizers: FollowedOptimizers


@dataclass(frozen=True)
class ExchangeParts:
    """What runs the exchanges.

    Attributes:
        pool: lanes.
        dispatcher: launches on them.
        memory: what exchanges and the algorithm keep.
        failures: what ends the exchanges.
        context: what the algorithm sees.
    """

    pool: LanePool
    dispatcher: Dispatcher
    memory: AlgorithmMemory
    failures: Failures
    context: EngineContext

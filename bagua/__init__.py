"""Bagua: fast data-parallel training of PyTorch modules on any network.

    import bagua
    bagua.init_process_group()
    model = bagua.distribute(model, optimizer, "bytegrad")

Importing has no side effects: no threads, no patched classes, no environment writes.
"""

from __future__ import annotations

from importlib import metadata as _metadata

from bagua import algorithms, checkpoint, codecs, elastic, exchanges, interop, nn, optim, topologies
from bagua.algorithms import Algorithm, Context
from bagua.autotune import Autotune
from bagua.comm.world import destroy_process_group, init_process_group
from bagua.engine import (
    GradScaler,
    Guard,
    Quality,
    Stats,
    StepStats,
    abort,
    average,
    detach,
    distribute,
    join,
    load_state_dict,
    no_sync,
    resume,
    state_dict,
    stats,
)
from bagua.errors import CommunicationError, RankMismatchError
from bagua.simulation import Simulation, simulate

__all__ = [
    "Algorithm",
    "Autotune",
    "CommunicationError",
    "Context",
    "GradScaler",
    "Guard",
    "Quality",
    "RankMismatchError",
    "Simulation",
    "Stats",
    "StepStats",
    "abort",
    "algorithms",
    "average",
    "checkpoint",
    "codecs",
    "destroy_process_group",
    "detach",
    "distribute",
    "elastic",
    "exchanges",
    "init_process_group",
    "interop",
    "join",
    "load_state_dict",
    "nn",
    "no_sync",
    "optim",
    "resume",
    "simulate",
    "state_dict",
    "stats",
    "topologies",
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        try:
            return _metadata.version("bagua")
        except _metadata.PackageNotFoundError:
            return "0+unknown"
    raise AttributeError(f"module 'bagua' has no attribute {name!r}")

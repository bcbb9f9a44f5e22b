"""Bagua: fast data-parallel training of PyTorch modules on any network.

    import bagua
    bagua.init_process_group()
    model = bagua.distribute(model, optimizer, "bytegrad")

What a training script needs:

    init_process_group      join the job of `bagua run` or torchrun; alone, a job of one rank
    distribute              from now on backward passes and optimizer steps communicate
    stats                   the algorithm in use, bytes sent, seconds waited, and notices
    no_sync                 accumulate gradients without communication
    join                    train although ranks have different numbers of batches
    average_parameters      make the weights of all ranks equal, before evaluating or saving
    checkpoint.save, .load  model, optimizers and what the algorithm keeps, in a directory
    GradScaler              as torch.amp.GradScaler, also where ranks step with local gradients
    algorithms.available    names, bytes per step and exactness of the algorithms; codecs.available: of the codecs
    detach                  stop communicating; the module is as before

Importing makes the backend "bagua" known to `torch.distributed`, and has no other side effects: no threads, no patched
classes, no environment writes. What needs torch is imported at its first use, so that commands which need none start at
once.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from importlib import metadata as _metadata
from typing import TYPE_CHECKING
from typing import Any as _Any

from bagua.registration import register_with_torch as _register_with_torch

if TYPE_CHECKING:
    from bagua import (
        algorithms,
        backend,
        checkpoint,
        codecs,
        data,
        elastic,
        exchanges,
        interop,
        lab,
        metrics,
        moe,
        net,
        nn,
        optim,
        topologies,
    )
    from bagua import comm as comm  # not in __all__, but attributes all the same
    from bagua import engine as engine
    from bagua import errors as errors
    from bagua import simulation as simulation
    from bagua import testing as testing
    from bagua.algorithms import Algorithm, Context
    from bagua.auto.explanation import explain
    from bagua.autotune import Autotune
    from bagua.backend import Backend
    from bagua.comm.world import destroy_process_group, init_process_group
    from bagua.engine import FaultTolerance, GradScaler, Guard, Quality, Stats, StepStats, module_state_dict

    # Not from the package: readers of the source would take `join` and `stats` for its modules of that name.
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
    from bagua.engine.join import join
    from bagua.errors import CommunicationError, RankMismatchError
    from bagua.simulation.simulate import Simulation, simulate

    __version__: str

__all__ = [
    "Algorithm",
    "Autotune",
    "Backend",
    "CommunicationError",
    "Context",
    "FaultTolerance",
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
    "average_parameters",
    "backend",
    "checkpoint",
    "codecs",
    "data",
    "destroy_process_group",
    "detach",
    "distribute",
    "elastic",
    "exchanges",
    "explain",
    "init_process_group",
    "interop",
    "join",
    "lab",
    "load_state_dict",
    "metrics",
    "module_state_dict",
    "moe",
    "net",
    "nn",
    "no_sync",
    "optim",
    "pause",
    "resume",
    "simulate",
    "state_dict",
    "stats",
    "topologies",
]

# Where a name is defined, which is imported when the name is first used.
_HOMES = {
    "bagua.algorithms": ("Algorithm", "Context"),
    "bagua.auto.explanation": ("explain",),
    "bagua.autotune": ("Autotune",),
    "bagua.backend": ("Backend",),
    "bagua.comm.world": ("destroy_process_group", "init_process_group"),
    "bagua.engine": (
        *("FaultTolerance", "GradScaler", "Guard", "Quality", "Stats", "StepStats", "abort", "average"),
        *("average_parameters", "detach"),
        *("distribute", "join", "load_state_dict", "module_state_dict", "no_sync", "pause", "resume", "state_dict"),
        "stats",
    ),
    "bagua.errors": ("CommunicationError", "RankMismatchError"),
    "bagua.simulation": ("Simulation", "simulate"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_PARTS = frozenset(
    (
        *(
            "algorithms",
            "autotune",
            "backend",
            "checkpoint",
            "codecs",
            "comm",
            "data",
            "elastic",
            "engine",
            "errors",
            "exchanges",
        ),
        *("interop", "lab", "metrics", "moe", "net", "nn", "optim", "plan", "simulation", "testing", "topologies"),
    )
)


if not TYPE_CHECKING:  # with it, type checkers would take any name for one of this package

    def __getattr__(name: str) -> _Any:
        if name in _HOME_OF:
            value = getattr(_import_module(_HOME_OF[name]), name)
        elif name in _PARTS:
            return _import_module(f"bagua.{name}")
        elif name == "__version__":
            value = _version()
        else:
            raise AttributeError(f"module 'bagua' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})


def _version() -> str:
    try:
        return _metadata.version("bagua")
    except _metadata.PackageNotFoundError:
        return "0+unknown"


_register_with_torch()

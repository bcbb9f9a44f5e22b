"""Modules that go on without lost ranks: who saves them, and where they cannot be loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from bagua.checkpoint.errors import CheckpointError
from bagua.comm.team import Team
from bagua.engine.hooks import attachments
from bagua.engine.recovery.options import is_fault_tolerant

__all__ = ["LOAD_BEFORE", "SAVE_TOGETHER", "check_nobody_is_left_out", "refuse_fault_tolerant", "with_those_left"]

LOAD_BEFORE = "load before bagua.distribute(), which gives all ranks what rank 0 has"
SAVE_TOGETHER = "use bagua.checkpoint.save, which the ranks that are left do together"
_T = TypeVar("_T")


def with_those_left(
    objects: Mapping[str, Any], what: str, work: Callable[[Team, int], _T], done: Callable[[], _T]
) -> Callable[[], _T] | None:
    """Does `work` with the ranks that train a fault-tolerant module among `objects`; None if there is none.

    Args:
        what, work, done: see `work_together`.
    """
    module = _fault_tolerant_in(objects)
    if module is None:
        return None
    together = attachments[module].work_together
    assert together is not None
    return lambda: together(module, what, work, done)


def check_nobody_is_left_out(process_group: Any, what: str) -> None:
    """In a fault-tolerant job, where only the engine of the module knows the ranks, without that module.

    Raises:
        CheckpointError: each rank would write a checkpoint of its own.
    """
    if process_group is None and not dist.is_initialized() and is_fault_tolerant():
        raise CheckpointError(
            f"{what}: this job has no process group, and none of the objects is a module distributed with "
            "fault_tolerant, which knows the other ranks; save together with it, after bagua.distribute()"
        )


def refuse_fault_tolerant(objects: object, what: str, instead: str) -> None:
    """Before anything is read, written or changed.

    Args:
        instead: what to do.

    Raises:
        CheckpointError: there is a fault-tolerant module among `objects`.
    """
    if isinstance(objects, Mapping) and (module := _fault_tolerant_in(objects)) is not None:
        raise CheckpointError(f"{what}: {type(module).__name__} is distributed with fault_tolerant; {instead}")


def _fault_tolerant_in(objects: Mapping[str, Any]) -> nn.Module | None:
    modules = (each for each in objects.values() if isinstance(each, nn.Module) and each in attachments)
    return next((each for each in modules if attachments[each].work_together is not None), None)

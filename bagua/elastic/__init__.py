"""Elastic training: resume from the last commit when ranks or hosts join or leave."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bagua.elastic.preemption import ignore_sigterm, shield
    from bagua.elastic.resharded import Resharded
    from bagua.elastic.resize import Resize
    from bagua.elastic.sampler import Sampler
    from bagua.elastic.state import Restored, State
    from bagua.engine.recovery.options import is_fault_tolerant

__all__ = [
    "Resharded",
    "Resize",
    "Restored",
    "Sampler",
    "State",
    "ignore_sigterm",
    "is_fault_tolerant",
    "shield",
]

_HOME = {  # name -> module that has it, imported at its first use
    "Resharded": "bagua.elastic.resharded",
    "Resize": "bagua.elastic.resize",
    "Restored": "bagua.elastic.state",
    "Sampler": "bagua.elastic.sampler",
    "State": "bagua.elastic.state",
    "ignore_sigterm": "bagua.elastic.preemption",
    "is_fault_tolerant": "bagua.engine.recovery.options",
    "shield": "bagua.elastic.preemption",
}


if not TYPE_CHECKING:  # with it, type checkers would take any name for one of this package

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(import_module(_HOME[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

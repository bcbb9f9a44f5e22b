"""What an observer is told about the modules of this process while they train: counts that are only read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from bagua.engine.engine import Engine

__all__ = ["describe"]

_CHANGES = 50


def describe(engines: Iterable[Engine]) -> dict[str, Any]:
    """The module with the most parameter bytes, since the others are small ones as a rule. From any thread.

    Raises:
        RuntimeError: a module is being distributed or detached at this moment.
    """
    all_engines = list(engines)
    told: dict[str, Any] = {
        "pid": os.getpid(),
        "restarts": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        "modules": len(all_engines),
        "clock": time.monotonic(),
    }
    if not all_engines:
        return told
    engine = max(all_engines, key=lambda each: sum(param.nbytes for param in each.inventory.trainable.values()))
    recovery = engine.failures.recovery
    changes = recovery.changes[-_CHANGES:] if recovery is not None else ()
    return {
        **told,
        "rank": engine.team.rank,
        "size": engine.team.size,
        "algorithm": engine.told(attrgetter("name")),
        "steps": engine.step,
        "total": engine.costs.to_dict(),
        "stalled_s": recovery.stalled_s if recovery is not None else 0.0,
        "failed": engine.failed,
        "changes": [asdict(change) for change in changes],
    }

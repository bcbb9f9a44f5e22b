"""The original's book-keeping of a tuning: its names, which say what there is instead."""

from __future__ import annotations

from bagua.gone import Gone
from bagua.service import INSTEAD

__all__ = ["AutotuneTaskManager"]

AutotuneTaskManager = Gone("bagua.service.autotune_task_manager.AutotuneTaskManager", INSTEAD)

"""Autotuning without engine and network: search space, trials, search strategies, results.

`bagua.engine.tuning` makes the ranks follow.
"""

from __future__ import annotations

from bagua.autotune.options import Autotune, as_options
from bagua.autotune.settings import ALWAYS_DIRECT, Settings
from bagua.autotune.space import Space
from bagua.autotune.strategies import STRATEGIES
from bagua.autotune.tuner import Measurement, Order, Outcome, Tuner

__all__ = [
    "ALWAYS_DIRECT",
    "STRATEGIES",
    "Autotune",
    "Measurement",
    "Order",
    "Outcome",
    "Settings",
    "Space",
    "Tuner",
    "as_options",
]

"""The original's tuning of Bagua-Net over ssh: its names, which say what there is instead."""

from __future__ import annotations

from bagua.gone import Gone

__all__ = ["autotune_system_hyperparameters", "sysperf"]

_INSTEAD = "bagua bench net measures Bagua-Net's settings, bagua_sys_perf a model's speed"

autotune_system_hyperparameters = Gone("bagua.service.autotune_system.autotune_system_hyperparameters", _INSTEAD)
sysperf = Gone("bagua.service.autotune_system.sysperf", _INSTEAD)

"""Whether NCCL would load the plugin, and if not, why."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bagua.net.plugin import NAME, PLUGIN_VARIABLE, plugin_path

__all__ = ["TABLES", "Verdict", "diagnose", "table_for"]

# NCCL versions from which on a table of the plugin is the highest one that NCCL asks for and the plugin has.
# Source: the plugin loaders of NCCL 2.18 to 2.30.
TABLES = (((2, 30), 12), ((2, 28), 11), ((2, 26), 10), ((2, 20), 8), ((2, 18), 6))
_PATHS_FROM = (2, 22)


@dataclass(frozen=True)
class Verdict:
    """Whether it would be loaded.

    Attributes:
        loads: NCCL would load the plugin.
        reason: one sentence.
    """

    loads: bool
    reason: str


def table_for(nccl: tuple[int, ...]) -> int | None:
    """Return the version of the table that this NCCL would use, None if it is too old for all."""
    return next((table for since, table in TABLES if nccl[:2] >= since), None)


def diagnose(nccl: tuple[int, ...] | None, env: Mapping[str, str]) -> Verdict:
    """Judge an environment.

    Args:
        nccl: NCCL's version, None if there is none.
        env: of the process that would start NCCL.
    """
    try:
        path = plugin_path()
        ctypes.CDLL(str(path))
    except (RuntimeError, OSError) as error:
        return Verdict(False, str(error))
    chosen = env.get(PLUGIN_VARIABLE, "")
    if not chosen:
        return Verdict(False, f"{PLUGIN_VARIABLE} is not set: use `bagua run --enable-bagua-net` or bagua.net.enable()")
    is_path = os.sep in chosen
    if (Path(chosen).resolve() != path.resolve()) if is_path else (chosen != NAME):
        return Verdict(False, f"{PLUGIN_VARIABLE}={chosen} names another plugin")
    forced = env.get("NCCL_NET", "")
    if forced and forced.lower() != NAME:
        return Verdict(False, f"NCCL_NET={forced} forces another network")
    if nccl is None:
        return Verdict(False, "there is no NCCL here: this torch was built without it, or has no GPU to use it for")
    text = ".".join(map(str, nccl))
    table = table_for(nccl)
    if table is None:
        return Verdict(False, f"NCCL {text} is too old: 2.18 is the first with a table that the plugin has")
    if is_path and nccl < _PATHS_FROM:
        return Verdict(False, f"NCCL {text} takes no path in {PLUGIN_VARIABLE}; set it to {NAME}")
    folders = env.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if not is_path and str(path.parent) not in folders:
        return Verdict(False, f"{path.parent} is not in LD_LIBRARY_PATH")
    return Verdict(True, f"NCCL {text} would use table v{table} of {path}")

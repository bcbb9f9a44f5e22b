"""Torch's flight recorder: the last collectives, which torch keeps in a ring buffer by default."""

from __future__ import annotations

import os
from typing import Any

import torch

__all__ = ["avoid_race", "recorded_collectives"]

_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def avoid_race(version: str = torch.__version__) -> None:
    """Turn the recorder off where it is not safe, unless the user has set its size; before the first collective.

    Before torch 2.13, gloo groups that several threads use at once may corrupt it: the process crashes or hangs
    (pytorch PR 179313). Lanes are such threads.

    Args:
        version: of torch.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (2, 13) and not any(name in os.environ for name in _SIZE):
        os.environ[_SIZE[0]] = "0"


def recorded_collectives() -> bytes | None:
    """Return what the recorder holds of gloo, a pickle of plain data as torch writes it; None if there is none.

    Never raises: it is called while an error is raised.
    """
    dump: Any = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace", None)
    if dump is None or os.environ.get(_SIZE[0]) == "0":
        return None
    try:
        return bytes(dump(includeStackTraces=False))
    except Exception:  # TORCH_FR_BUFFER_SIZE is not a number
        return None

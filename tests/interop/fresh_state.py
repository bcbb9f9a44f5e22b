"""Accelerate keeps its state for the process; jobs of the rank pool need a new one each."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def as_launched() -> Iterator[None]:
    """The environment that torchrun makes, and Accelerate as in a new process; both end with the block."""
    from accelerate.state import AcceleratorState, GradientState

    os.environ |= {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

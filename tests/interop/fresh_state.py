"""Accelerate keeps its state for the process; jobs of the rank pool need a new one each."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def as_launched() -> Iterator[None]:
    """The environment that torchrun makes, and Accelerate as in a new process; both end with the block.

    Accelerate takes fp16 and a gradient scaler on GPUs only; here it takes them on CPUs too.
    """
    from accelerate import Accelerator
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
    init = Accelerator.__init__
    Accelerator.__init__ = _with_half_precision(init)
    try:
        yield
    finally:
        Accelerator.__init__ = init
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def _with_half_precision(init: Callable[..., None]) -> Callable[..., None]:
    """`init` of an Accelerator, after which fp16 on CPUs has what it has on GPUs."""

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.state.mixed_precision == "fp16":
            assert self.scaler is None
            given = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", **given)

    return made

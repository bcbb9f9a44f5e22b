"""Launches of Triton kernels that cost little time of the CPU. Does not import Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Launcher"]

_MOST = 4096  # different launches that are remembered


class Launcher:
    """Launches a kernel, from the second time on without what Triton does to find the compiled one.

    Triton looks at each argument of each launch, which takes longer than most kernels run. What it looks at is in the
    key: the values of integers and constants, and whether tensors are aligned. Types never differ.

    Args:
        kernel: a function of `triton.jit`.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def __call__(
        self, device: torch.device, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], args: tuple[Any, ...]
    ) -> None:
        """Launch on the current stream of `device`.

        Args:
            device: of the tensors.
            grid: number of programs.
            tensors: those among `args`.
            args: all of them, constants too.
        """
        key = (
            device.index,
            tuple(each.data_ptr() % 16 == 0 for each in tensors),
            tuple(each for each in args if isinstance(each, int)),
        )
        compiled = self._compiled.get(key)
        if compiled is not None and torch.cuda.current_device() == device.index:
            compiled[grid](*args)
            return
        with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device, wherever the tensors are
            # Without fused multiply-add: all backends give the same bits.
            compiled = self._kernel[grid](*args, enable_fp_fusion=False, num_warps=4)
        if compiled is None or device.index is None or not hasattr(compiled, "packed_metadata"):
            return  # the interpreter
        if len(self._compiled) >= _MOST:
            self._compiled.clear()
        self._compiled[key] = compiled

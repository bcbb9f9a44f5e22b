"""On which CUDA streams autograd accumulates the gradients of one pass."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["GradientStreams"]


class GradientStreams:
    """The streams on which gradients came.

    Autograd accumulates a gradient on the stream on which the forward pass first used the parameter, and runs the hook
    there. A bucket is launched in the hook of its last gradient. If the forward pass used several streams, the other
    gradients may still be in progress on theirs: nothing orders the streams before the end of the pass.

    Args:
        device: of the parameters, a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._current = torch._C._cuda_getCurrentRawStream  # 0.1 us; torch.cuda.current_stream() takes 1
        self._seen: dict[int, torch.cuda.Stream] = {}

    def clear(self) -> None:
        """A pass begins."""
        self._seen.clear()

    def note(self) -> None:
        """A gradient has come on the current stream."""
        raw = self._current(self._index)
        if raw not in self._seen:
            self._seen[raw] = torch.cuda.current_stream(self._device)

    def join(self) -> bool:
        """Let the current stream wait for the gradients that have come; returns whether any came on another one."""
        here = self._current(self._index)
        if self._seen.keys() <= {here}:
            return False
        current = torch.cuda.current_stream(self._device)
        for raw, stream in self._seen.items():
            if raw != here:
                current.wait_stream(stream)
        return True

    def keep(self, gradients: Iterable[Tensor]) -> None:
        """Keep the memory of `gradients` until the current stream has read them.

        It goes back to the stream that made them, which would use it again without waiting for a copy on this one.
        """
        current = torch.cuda.current_stream(self._device)
        for gradient in gradients:
            gradient.record_stream(current)

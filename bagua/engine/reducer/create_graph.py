"""`backward(create_graph=True)`: averaged gradients that can be differentiated once more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagua.engine.reducer.bucket import Bucket

__all__ = ["GradientGraphs"]


class GradientGraphs:
    """The autograd graphs of one pass's gradients, which an exchange would drop.

    Attributes:
        wanted: the pass makes gradients that can be differentiated.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._kept: list[tuple[int, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._kept)

    def note(self, bucket: Bucket, positions: Mapping[str, int]) -> None:
        """Keep the gradients of `bucket`, which is about to be launched; `positions` numbers the parameters."""
        found = [(positions[name], param.grad) for name, param in zip(bucket.names, bucket.params, strict=True)]
        self._kept += [(index, grad) for index, grad in found if grad is not None and grad.requires_grad]

    def deliver(self, params: Sequence[nn.Parameter], means: Sequence[Tensor]) -> None:
        """Give the means the graphs of this rank's gradients.

        The mean over the ranks of what a second pass makes of them is then the derivative through the mean itself.
        """
        kept, self._kept = self._kept, []
        with torch.enable_grad():
            for index, grad in kept:
                params[index].grad = _WithGraph.apply(grad, means[index])

    def clear(self) -> None:
        """Drop what was kept."""
        self._kept.clear()


class _WithGraph(torch.autograd.Function):
    """The value of `mean`, with the derivative of `local`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, mean: Tensor) -> Tensor:
        return mean.clone(memory_format=torch.preserve_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None

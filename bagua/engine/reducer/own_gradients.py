"""`gradient_as_bucket_view=False`: the mean of the gradients goes back to the tensors that were `.grad`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bagua.engine.reducer.bucket import Bucket

__all__ = ["OwnGradients"]


class OwnGradients:
    """The tensors that were `.grad` when their buckets were launched, in one pass.

    As without an engine, `.grad` is the same object before and after the exchange. The next pass does not write into
    it unless autograd accumulates there.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def clear(self) -> None:
        """A pass begins."""
        self._kept.clear()

    def note(self, bucket: Bucket, positions: Mapping[str, int]) -> None:
        """Keep the gradients of `bucket`, which is about to be launched; `positions` numbers the parameters."""
        for position, grad in bucket.away.items():
            self._kept[positions[bucket.names[position]]] = grad

    @torch.no_grad()
    def give_back(self, params: Sequence[nn.Parameter], means: Sequence[Tensor]) -> None:
        """Copy the means out of the buckets and let `.grad` be what it was, or a new tensor if there was none."""
        kept, self._kept = self._kept, {}
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        taken: set[int] = set()  # addresses: gradients of two parameters may share memory
        for index, (param, mean) in enumerate(zip(params, means, strict=True)):
            if param.grad is not mean:
                continue
            own = kept.get(index)
            if own is None or own.requires_grad or own.is_inference() or own.data_ptr() in taken:
                own = torch.empty_like(mean)
            taken.add(own.data_ptr())
            targets.append(own)
            sources.append(mean)
            param.grad = own
        if targets:
            torch._foreach_copy_(targets, sources)

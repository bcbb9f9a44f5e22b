"""Iteration over cache-sized ranges of several dense tensors at once.

A step makes a dozen operations, one after the other. Over whole tensors each of them reads and writes memory, and
each temporary is memory that the system has yet to hand out. Over a range, all but the first find theirs in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.optim.fused.memory import dense_view, is_dense

__all__ = ["Batch", "Joined", "Live", "batches", "ranges"]

#: A parameter, its gradient and its state.
Live = tuple[Tensor, Tensor, dict[str, Any]]
#: Parameters that are stepped together, their gradients, their states.
Batch = tuple[list[Tensor], list[Tensor], list[dict[str, Any]]]

# Elements of one thread's share of an operation. Fewer stay closer to the core, but the calls then cost more than
# that brings. A power of two: the vectors of a range are those of the whole tensor.
_PER_THREAD = 1 << 18
# Of shorter types torch's kernels round the elements that fill no vector otherwise, and where those are depends on
# how an operation is shared among threads.
_CUT = (torch.float32, torch.float64)


def _longest() -> int:
    return _PER_THREAD * torch.get_num_threads()


def batches(live: Sequence[Live]) -> Iterator[Batch]:
    """Split `live` into batches that are stepped together.

    On a CPU that is one large parameter, or several small ones that are no more than a range together; on other
    devices all.
    """
    longest, elements = _longest(), 0
    small: list[Live] = []
    elsewhere: list[Live] = []
    for one in live:
        numel = one[0].numel()
        if one[0].device.type != "cpu":
            elsewhere.append(one)
        elif numel > longest:
            yield _batch([one])
        else:
            if elements + numel > longest:
                yield _batch(small)
                small, elements = [], 0
            small.append(one)
            elements += numel
    yield from (_batch(rest) for rest in (small, elsewhere) if rest)


def _batch(live: Sequence[Live]) -> Batch:
    return [one[0] for one in live], [one[1] for one in live], [one[2] for one in live]


def ranges(*columns: list[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Iterate over the tensors of one batch: parameters, gradients, moments and so on, each in one list.

    Yields lists like `columns`. If they hold one large tensor each and these lie in memory alike, lists of one flat
    range each, otherwise `columns` themselves. What is done to a range is done to the tensor.
    """
    row, longest = [column[0] for column in columns], _longest()
    if len(columns[0]) > 1 or row[0].numel() <= longest or not _alike(row):
        yield columns
    else:
        flat = [dense_view(tensor).split(longest) for tensor in row]
        yield from (tuple([part] for part in parts) for parts in zip(*flat, strict=True))


def _alike(row: Sequence[Tensor]) -> bool:
    """Whether the same position in memory is the same element in all of them."""
    first = row[0]
    if first.layout is not torch.strided or first.dtype not in _CUT or not is_dense(first):
        return False
    strides = _strides(first)
    return all(
        type(each.detach()) is Tensor
        and each.device.type == "cpu"
        and each.dtype is first.dtype
        and each.size() == first.size()
        and _strides(each) == strides
        for each in row
    )


def _strides(tensor: Tensor) -> list[int]:
    """Those that matter."""
    return [stride for stride, size in zip(tensor.stride(), tensor.size(), strict=True) if size != 1]


class Joined:
    """Results of the ranges of a walk, as whole tensors in the end.

    Args:
        like: a column of the walk.

    Attributes:
        tensors: whole once the walk is over.
    """

    def __init__(self, like: list[Tensor]) -> None:
        self._like = like
        self._next = 0
        self.tensors: list[Tensor] = []

    def add(self, results: list[Tensor]) -> None:
        """Take the results of the next range."""
        like = self._like[0]
        if results[0].numel() == like.numel():
            self.tensors = results
            return
        if not self.tensors:
            self.tensors = [torch.empty_like(like, memory_format=torch.preserve_format)]
        dense_view(self.tensors[0]).narrow(0, self._next, results[0].numel()).copy_(results[0])
        self._next += results[0].numel()

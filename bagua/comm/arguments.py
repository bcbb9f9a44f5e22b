"""Argument checks of the primitives, and flat views of tensors."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bagua.comm.groups import Group

__all__ = [
    "as_bytes",
    "check_count",
    "check_numel",
    "check_rank",
    "check_tensors",
    "flat",
    "overlap",
    "spans",
]


def as_bytes(x: Tensor) -> Tensor:
    """`x`, contiguous, seen as uint8; its last dimension grows accordingly."""
    return x.view(torch.uint8)


@contextmanager
def flat(tensor: Tensor, write: bool = False) -> Iterator[Tensor]:
    """Lend `tensor` as a contiguous tensor of one dimension, without a copy where it is contiguous.

    Args:
        tensor: any strides; a leaf that requires a gradient is fine.
        write: whether what is written to the flat tensor must reach `tensor`.
    """
    plain = tensor.detach()
    x_N = plain.contiguous().view(-1)
    yield x_N
    if write and not plain.is_contiguous():
        plain.copy_(x_N.view(plain.shape))


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the two may share memory."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def check_tensors(same_dtype: bool = True, **tensors: Any) -> None:
    """Check that tensors are strided and have the device (and dtype) of the first.

    Raises:
        TypeError: not a tensor.
        ValueError: sparse or quantised; another device or dtype.
    """
    first_name, first = next(iter(tensors.items()), ("", None))
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = "quantised" if tensor.is_quantized else tensor.layout
            raise ValueError(f"{name}: expected a dense tensor, got a {kind} one")
        assert first is not None
        if tensor.device != first.device:
            raise ValueError(f"{name}: is on {tensor.device}, but {first_name} on {first.device}")
        if same_dtype and tensor.dtype != first.dtype:
            raise ValueError(f"{name}: is {tensor.dtype}, but {first_name} is {first.dtype}")


def check_rank(group: Group, name: str, rank: Any, other: bool = False) -> int:
    """Check that `rank` is in the group and, with `other`, is not this rank (no backend sends to itself).

    Raises:
        TypeError: not an integer.
        ValueError: out of range, or this rank's own.
    """
    index = _index(name, rank)
    if not 0 <= index < group.size:
        raise ValueError(f"{name}: rank {rank} is not in the group, whose ranks are 0 to {group.size - 1}")
    if other and index == group.rank:
        raise ValueError(f"{name}: rank {rank} is this rank; a rank cannot send to itself or receive from itself")
    return index


def check_numel(name: str, tensor: Tensor, numel: int, why: str) -> None:
    """Refuse a tensor that has not exactly `numel` elements.

    Raises:
        ValueError: names both numbers and `why`.
    """
    if tensor.numel() != numel:
        raise ValueError(f"{name}: has {tensor.numel()} elements, expected {numel} ({why})")


def check_multiple(name: str, tensor: Tensor, size: int) -> None:
    """Refuse a tensor that does not split into `size` equal parts.

    Raises:
        ValueError: it does not.
    """
    if tensor.numel() % size:
        raise ValueError(f"{name}: has {tensor.numel()} elements, expected a multiple of the {size} ranks")


def check_count(name: str, tensor: Tensor, count: Any, parts: int) -> int:
    """Return `count`, refusing a tensor too small for `parts` parts of it.

    Raises:
        TypeError: `count` is not an integer.
        ValueError: it is negative, or the tensor too small.
    """
    count = _index("count", count)
    if count < 0:
        raise ValueError(f"count: expected 0 or more elements, got {count}")
    if tensor.numel() < parts * count:
        raise ValueError(
            f"{name}: has {tensor.numel()} elements, expected at least {parts} times count = {parts * count}"
        )
    return count


def spans(
    group: Group, what: str, tensor: Tensor, counts: Sequence[int], displs: Sequence[int]
) -> list[tuple[int, int]]:
    """Return (begin, end) of each rank's part of `tensor`; entries beyond the group's size are ignored.

    Args:
        group: whose ranks the entries are for.
        what: prefix of the arguments' names, "send_", "recv_" or "".
        tensor: where the parts lie.
        counts: elements of each part.
        displs: first element of each part.

    Raises:
        TypeError: an entry is not an integer.
        ValueError: too few entries, or a part that lies outside the tensor.
    """
    size = group.size
    for name, values in ((f"{what}counts", counts), (f"{what}displs", displs)):
        if len(values) < size:
            raise ValueError(f"{name}: has {len(values)} entries, expected one for each of the {size} ranks")
    found: list[tuple[int, int]] = []
    for rank in range(size):
        count = _index(f"{what}counts[{rank}]", counts[rank])
        begin = _index(f"{what}displs[{rank}]", displs[rank])
        if count < 0 or begin < 0 or begin + count > tensor.numel():
            raise ValueError(
                f"{what}counts[{rank}], {what}displs[{rank}]: elements {begin} to {begin + count} are "
                f"not within {what}tensor, which has {tensor.numel()} elements"
            )
        found.append((begin, begin + count))
    return found


def _index(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}") from None

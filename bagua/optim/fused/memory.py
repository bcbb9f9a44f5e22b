"""Memory layout of tensors."""

from __future__ import annotations

from torch import Tensor

from bagua.held import is_held

__all__ = ["dense_view", "have_equal_order", "is_bound", "is_dense", "is_part"]


def is_part(tensor: Tensor) -> bool:
    """Whether its storage holds more than this tensor."""
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def is_bound(tensor: Tensor) -> bool:
    """Whether a strided tensor is part of something larger, or all of what somebody uses as a whole."""
    return is_part(tensor) or is_held(tensor)


def dense_view(param: Tensor) -> Tensor:
    """All elements of a dense tensor as a vector, in the order in which they lie in memory."""
    return param.detach().as_strided((param.numel(),), (1,), param.storage_offset())


def have_equal_order(one: Tensor, other: Tensor) -> bool:
    """Whether the elements of two dense tensors of equal shape lie in memory in the same order."""
    strides = zip(one.stride(), other.stride(), one.size(), strict=True)
    return all(a == b or size == 1 for a, b, size in strides)


def is_dense(param: Tensor) -> bool:
    """Whether the elements fill a range of memory without gap or overlap, in some order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True

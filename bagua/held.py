"""Flat tensors that are used as a whole: what lies in one must not be moved out of it.

A storage that holds more than a parameter shows that the parameter is part of something. That of a bucket with one
parameter does not, so the bucket's owner says so here.
"""

from __future__ import annotations

import weakref

from torch import Tensor

__all__ = ["hold", "is_held"]

# By the address of the storage. The memory cannot be used for something else while the tensor lives.
_held: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def hold(flat: Tensor) -> None:
    """Declare that parameters and gradients in the storage of `flat` stay there while the object `flat` lives."""
    if flat.numel():
        _held[flat.untyped_storage().data_ptr()] = flat


def is_held(tensor: Tensor) -> bool:
    """Whether a strided tensor lies in the storage of a flat tensor that `hold` was called on and that still lives."""
    return tensor.untyped_storage().data_ptr() in _held

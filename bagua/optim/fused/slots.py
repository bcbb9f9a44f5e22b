"""An optimizer's state of one parameter: tensors of its shape, scalars, or other values.

A slot is `optimizer.state[param]`, a dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Slot", "fits", "is_elementwise", "is_scalar", "same_scalars", "same_value"]

Slot = dict[Any, Any]
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def is_elementwise(value: Any, param: Tensor) -> bool:
    """Whether `value` holds one number for each element of `param`, which has two elements or more."""
    return isinstance(value, Tensor) and value.shape == param.shape


def is_scalar(value: Any) -> bool:
    """Whether `value` may be the same for all parameters: a number, a string, a tensor of one element, or such."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, tuple):
        return all(is_scalar(item) and not isinstance(item, Tensor) for item in value)
    return isinstance(value, _PLAIN)


def fits(slot: Mapping[Any, Any], param: Tensor) -> bool:
    """Whether a flat parameter could have such a slot."""
    return all(
        (is_elementwise(value, param) and value.device == param.device and type(value) is Tensor) or is_scalar(value)
        for value in slot.values()
    )


def same_value(one: Any, other: Any) -> bool:
    """Equal bit for bit (NaN equals NaN), of the same type, dtype and shape."""
    if type(one) is not type(other):
        return False
    if not isinstance(one, Tensor):
        return one == other or (one != one and other != other)
    if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
        return False
    return torch.equal(one, other) or (one.is_floating_point() and torch.equal(_bits(one), _bits(other)))


def _bits(value: Tensor) -> Tensor:
    """NaN as one value, minus zero as zero."""
    return torch.nan_to_num(value, nan=0.0, posinf=float("inf"), neginf=float("-inf")) + value.isnan() * 3


def same_scalars(one: Mapping[Any, Any], other: Mapping[Any, Any], elementwise: set[Any]) -> bool:
    """Whether two slots agree in their keys and in everything but the keys in `elementwise`."""
    if one.keys() != other.keys():
        return False
    return all(key in elementwise or same_value(value, other[key]) for key, value in one.items())

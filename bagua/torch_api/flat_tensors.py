"""Several tensors as one, and back, as scripts for the original do it by hand. Nothing of this package uses it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

__all__ = [
    "apply_flattened_call",
    "apply_flattened_call_all",
    "check_contiguous",
    "flatten",
    "get_flattened_tensor",
    "to_bagua_datatype",
    "unflatten",
]

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.uint8: "u8", torch.int64: "i64"}


def apply_flattened_call(
    bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Call `call` with the tensors of one dtype as one flat tensor, and copy it back.

    With `torch.distributed.all_reduce` the sum is divided by the number of ranks, as in the original.
    """
    whole = flatten(bucket)
    call(whole, *(extra_args or ()))
    if call is dist.all_reduce:
        whole /= dist.get_world_size()
    with torch.no_grad():
        for tensor, part in zip(bucket, unflatten(whole, bucket), strict=True):
            tensor.copy_(part)


def apply_flattened_call_all(tensors: Sequence[Tensor], call: Callable[..., Any]) -> None:
    """`apply_flattened_call` for each dtype and device among `tensors`."""
    for bucket in _group_by_tensor_type(tensors).values():
        apply_flattened_call(bucket, call)


def _group_by_tensor_type(tensors: Sequence[Tensor]) -> OrderedDict[str, list[Tensor]]:
    groups: OrderedDict[str, list[Tensor]] = OrderedDict()
    for tensor in tensors:
        groups.setdefault(tensor.type(), []).append(tensor)
    return groups


def check_contiguous(tensors: Sequence[Tensor]) -> bool:
    """Whether each tensor begins in memory where the one before ends."""
    ends = [each.data_ptr() + each.numel() * each.element_size() for each in tensors]
    return all(end == after.data_ptr() for end, after in zip(ends, tensors[1:], strict=False))


def get_flattened_tensor(tensors: Sequence[Tensor]) -> Tensor | None:
    """A copy of all elements, one tensor after the other; None without tensors."""
    if not tensors:
        return None
    return torch.cat([each.detach().reshape(-1).to(tensors[0]) for each in tensors])


def to_bagua_datatype(datatype: torch.dtype) -> str:
    """The original's name of a dtype.

    Raises:
        ValueError: it had none.
    """
    if datatype not in _DTYPES:
        raise ValueError(f"datatype: expected one of {', '.join(map(str, _DTYPES))}, got {datatype}")
    return _DTYPES[datatype]

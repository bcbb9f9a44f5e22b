"""The original's descriptions of tensors and settings, as plain data. Nothing of this package uses them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

__all__ = [
    "BaguaCoreTelemetrySpan",
    "BaguaHyperparameter",
    "TensorDeclaration",
    "TensorDtype",
    "get_tensor_declaration_bytes",
]


class TensorDtype(str, enum.Enum):
    """Element types by the original's names."""

    F32 = "f32"
    F16 = "f16"
    U8 = "u8"


class TensorDeclaration(TypedDict):
    """A tensor's name, size and element type."""

    name: str
    num_elements: int
    dtype: TensorDtype


class BaguaCoreTelemetrySpan(TypedDict):
    """When something was done with a tensor."""

    trace_id: int
    action: str
    tensor_name: str
    start_time: int
    end_time: int


_SIZES = {"f32": 4, "f16": 2, "u8": 1}


def get_tensor_declaration_bytes(td: TensorDeclaration) -> int:
    """Size of the tensor in bytes.

    Raises:
        ValueError: an element type that `TensorDtype` does not have.
    """
    return td["num_elements"] * _SIZES[TensorDtype(td["dtype"]).value]


@dataclass
class BaguaHyperparameter:
    """What the original's tuner chose. Here `bagua.Autotune` chooses, and `bagua.stats(module)` says what.

    Attributes:
        buckets: the tensors of each.
        bucket_size: in bytes.
        is_hierarchical_reduce: within nodes first.
    """

    buckets: list[list[TensorDeclaration]] = field(default_factory=list)
    bucket_size: int = 0
    is_hierarchical_reduce: bool = False

    def dict(self) -> Mapping[str, Any]:
        """The fields by name."""
        return asdict(self)

    def update(self, param_dict: Mapping[str, Any]) -> BaguaHyperparameter:
        """Set the fields of these names, and leave out names that are no fields; returns itself."""
        for name in self.dict().keys() & param_dict.keys():
            setattr(self, name, param_dict[name])
        return self

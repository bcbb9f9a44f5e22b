"""The codecs as torch operators: `torch.ops.bagua.minmax_uint8_encode(x_RN, 1024)`.

For code that goes through `torch.compile`, `torch.export` or a dispatch mode; the library itself calls the codecs.
Each codec has five operators, its options come last. They return new tensors and have no derivatives:

    {codec}_encode(Tensor x_RN, options) -> Tensor
    {codec}_decode(Tensor wire_RW, SymInt n, ScalarType dtype, options) -> Tensor
    {codec}_decode_mean(Tensor wire_RW, SymInt n, float weight, options) -> Tensor                      (fp32 [n])
    {codec}_encode_with_feedback(Tensor x_RN, Tensor(a!) residual_RN, options) -> Tensor
    {codec}_decode_mean_encode(Tensor wire_RW, SymInt n, float weight, Tensor(a!)? residual_N, options) -> Tensor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from bagua.codecs.base import Codec
from bagua.codecs.checks import check_rows
from bagua.codecs.packed_top_k import PackedTopK
from bagua.codecs.registry import registry
from bagua.codecs.top_k import TopK

__all__ = ["OPTIONS"]

_KINDS = {"bool": "bool", "float": "float", "int": "int", "int | None": "int?", "str": "str"}  # in a schema


def _schema(codec: type[Codec]) -> str:
    """The options of a codec as a schema declares them: ", int? block=1024"."""
    return "".join(f", {_KINDS[str(option.type)]} {option.name}={option.default}" for option in fields(codec))


# The options of each of the library's codecs as the operators' schemas declare them.
OPTIONS: Mapping[Callable[..., Codec], str] = {registry[name]: _schema(registry[name]) for name in registry.builtin()}

_library = torch.library.Library("bagua", "FRAGMENT")


class _Operators:
    """The operators of one codec and what they return for tensors without data."""

    def __init__(self, make: Callable[..., Codec]) -> None:
        self._make = make

    def encode(self, x_RN: Tensor, *options: Any) -> Tensor:
        codec = self._make(*options)
        check_rows("x_RN", x_RN)
        return codec.encode(x_RN, out=_wire(codec, x_RN))  # with out it is never a view of x_RN

    def encode_fake(self, x_RN: Tensor, *options: Any) -> Tensor:
        return _wire(self._make(*options), x_RN)

    def decode(self, wire_RW: Tensor, n: int, dtype: torch.dtype, *options: Any) -> Tensor:
        return self._make(*options).decode(wire_RW, n, dtype=dtype)

    def decode_fake(self, wire_RW: Tensor, n: int, dtype: torch.dtype, *options: Any) -> Tensor:
        return wire_RW.new_empty((wire_RW.shape[0], n), dtype=dtype)

    def decode_mean(self, wire_RW: Tensor, n: int, weight: float, *options: Any) -> Tensor:
        out_N = wire_RW.new_empty((n,), dtype=torch.float32)
        return self._make(*options).decode_mean(wire_RW, n, out_N, weight)

    def decode_mean_fake(self, wire_RW: Tensor, n: int, weight: float, *options: Any) -> Tensor:
        return wire_RW.new_empty((n,), dtype=torch.float32)

    def encode_with_feedback(self, x_RN: Tensor, residual_RN: Tensor, *options: Any) -> Tensor:
        return self._make(*options).encode_with_feedback(x_RN, residual_RN)

    def encode_with_feedback_fake(self, x_RN: Tensor, residual_RN: Tensor, *options: Any) -> Tensor:
        return _wire(self._make(*options), x_RN)

    def decode_mean_encode(
        self, wire_RW: Tensor, n: int, weight: float, residual_N: Tensor | None, *options: Any
    ) -> Tensor:
        return self._make(*options).decode_mean_encode(wire_RW, n, weight, residual_N)

    def decode_mean_encode_fake(
        self, wire_RW: Tensor, n: int, weight: float, residual_N: Tensor | None, *options: Any
    ) -> Tensor:
        return wire_RW.new_empty((1, wire_RW.shape[1]))


def _wire(codec: Codec, x_RN: Tensor) -> Tensor:
    rows, n = x_RN.shape
    width = codec.wire_bytes(int(n) if isinstance(codec, TopK | PackedTopK) else n, x_RN.dtype)
    return x_RN.new_empty((rows, width), dtype=torch.uint8)


_SCHEMAS = {
    "encode": "(Tensor x_RN{})",
    "decode": "(Tensor wire_RW, SymInt n, ScalarType dtype{})",
    "decode_mean": "(Tensor wire_RW, SymInt n, float weight{})",
    "encode_with_feedback": "(Tensor x_RN, Tensor(a!) residual_RN{})",
    "decode_mean_encode": "(Tensor wire_RW, SymInt n, float weight, Tensor(a!)? residual_N{})",
}


def _define() -> None:
    tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag)
    for make, options in OPTIONS.items():
        operators = _Operators(make)
        for what, schema in _SCHEMAS.items():
            name = f"{make.name}_{what}"  # type: ignore[attr-defined]
            _library.define(name + schema.format(options) + " -> Tensor", tags=tags)
            _library.impl(name, getattr(operators, what), "CompositeExplicitAutograd")
            torch.library.register_fake(f"bagua::{name}", getattr(operators, f"{what}_fake"), lib=_library)


_define()

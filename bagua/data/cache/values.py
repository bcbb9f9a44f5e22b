"""Serialisation of samples without pickle: bytes from a store never run code.

A payload is the length of an outline (8 bytes), the outline (JSON), and the raw bytes of tensors, arrays and byte
strings, each at a multiple of 64. In the outline everything but None, bool, float, str and small int is an object
with one key, its kind. Reading makes no copy: tensors and arrays are views of the buffer.
"""

from __future__ import annotations

import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["read_payload", "write_payload"]

_ALIGNMENT = 64
_MAX_DEPTH = 64
_ARRAY_KINDS = "biufcSUmM"  # numpy's dtype.kind without objects and records
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits", "torch.float4"))
}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_NAMES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
_WAY_OUT = 'convert it, or choose serializer="pickle" if you trust everyone who can write to the store'
_ACCEPTED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, set, dict, CPU tensors, numpy arrays and PIL images, "
    "nested at will"
)


def write_payload(value: Any, head_bytes: int = 0, allocate: Callable[[int], bytearray] = bytearray) -> bytearray:
    """Return `head_bytes` of whatever and the payload of `value`, copied from it once.

    Args:
        allocate: returns that many bytes, of any content.

    Raises:
        TypeError: `value` holds something that has no plain form; says where.
        ValueError: it is nested more than 64 deep (it may contain itself).
    """
    writer = _Writer()
    outline = json.dumps(writer.outline(value, "sample", 0), separators=(",", ":")).encode()
    begin = _aligned(8 + len(outline))
    buffer = allocate(head_bytes + begin + writer.nbytes)
    payload = memoryview(buffer)[head_bytes:]
    payload[:8] = len(outline).to_bytes(8, "little")
    payload[8 : 8 + len(outline)] = outline
    for offset, copy in writer.copies:
        copy(payload, begin + offset)
    return buffer


def read_payload(payload: memoryview) -> Any:
    """Return the value of a payload; tensors and arrays in it are views of the buffer, which must be writable.

    Raises:
        ValueError: the payload is damaged.
    """
    length = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or length > len(payload) - 8:
        raise ValueError("damaged payload: it is too short")
    try:
        return _Reader(payload, _aligned(8 + length)).build(json.loads(bytes(payload[8 : 8 + length])))
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"damaged payload: {error}") from error


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class _Writer:
    """Builds the outline and notes which raw bytes go where; offsets count from the end of the outline."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.copies: list[tuple[int, Callable[[memoryview, int], None]]] = []

    def outline(self, value: Any, where: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(f"{where}: nested more than {_MAX_DEPTH} deep; does it contain itself?")
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if abs(value) < 1 << 63 else {"int": hex(value)}
        if kind in _NAMES:
            return {_NAMES[kind]: [self.outline(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]}
        if kind in (dict, OrderedDict):
            pairs = [
                [self.outline(key, f"a key of {where}", depth + 1), self.outline(item, f"{where}[{key!r}]", depth + 1)]
                for key, item in value.items()
            ]
            return {"dict" if kind is dict else "ordered": pairs}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind in (bytes, bytearray):
            return {kind.__name__: self._raw(value)}
        return self._array(value, where)

    def _array(self, value: Any, where: str) -> Any:
        if type(value) is Tensor:
            return {"tensor": self._tensor(value, where)}
        if _is_numpy(value):
            if value.dtype.kind not in _ARRAY_KINDS:
                raise TypeError(
                    f"{where}: a numpy array of dtype {value.dtype} cannot be cached, only of numbers, text and times; "
                    f"{_WAY_OUT}"
                )
            name = "array" if type(value).__name__ == "ndarray" else "scalar"
            return {name: [value.dtype.str, list(value.shape), self._numpy(value)]}
        image = sys.modules.get("PIL.Image")  # whoever holds one has imported it; Bagua does not need it
        if image is not None and isinstance(value, image.Image):
            palette = value.getpalette("RGB") if value.mode in ("P", "PA") else None
            return {"image": [value.mode, list(value.size), palette, self._raw(value.tobytes())]}
        kind = type(value)
        raise TypeError(
            f"{where}: a {kind.__module__}.{kind.__qualname__} cannot be cached; supported types: {_ACCEPTED}; "
            f"{_WAY_OUT}"
        )

    def _tensor(self, tensor: Tensor, where: str) -> list[Any]:
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout is not torch.strided or name not in _DTYPES:
            raise TypeError(f"{where}: a tensor of {tensor.layout}, {tensor.dtype} cannot be cached, only dense ones")
        if tensor.device.type != "cpu":
            raise TypeError(f"{where}: a tensor on {tensor.device} cannot be cached; samples must be on the CPU")
        count = tensor.numel()
        detached = tensor.detach().resolve_conj().resolve_neg()

        def copy(payload: memoryview, offset: int) -> None:
            if count:
                flat = torch.frombuffer(payload, dtype=tensor.dtype, count=count, offset=offset)
                flat.view(tensor.shape).copy_(detached)

        return [name, list(tensor.shape), *self._reserve(count * tensor.element_size(), copy)]

    def _numpy(self, value: Any) -> list[int]:
        numpy = sys.modules["numpy"]

        def copy(payload: memoryview, offset: int) -> None:
            if value.nbytes:
                numpy.frombuffer(payload, value.dtype, value.size, offset).reshape(value.shape)[...] = value

        return self._reserve(value.nbytes, copy)

    def _raw(self, value: bytes | bytearray) -> list[int]:
        def copy(payload: memoryview, offset: int) -> None:
            payload[offset : offset + len(value)] = value

        return self._reserve(len(value), copy)

    def _reserve(self, nbytes: int, copy: Callable[[memoryview, int], None]) -> list[int]:
        offset = self.nbytes
        self.copies.append((offset, copy))
        self.nbytes = _aligned(offset + nbytes)
        return [offset, nbytes]


def _is_numpy(value: Any) -> bool:
    """An array (no subclass of it) or a scalar of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))


class _Reader:
    """Builds a value from its outline; every offset is checked before it is used."""

    def __init__(self, payload: memoryview, begin: int) -> None:
        self._payload, self._begin = payload, begin

    def build(self, outline: Any) -> Any:
        if not isinstance(outline, dict):
            return outline
        ((kind, content),) = outline.items()
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([self.build(item) for item in content])
        if kind in ("dict", "ordered"):
            pairs = [(self.build(key), self.build(item)) for key, item in content]
            return dict(pairs) if kind == "dict" else OrderedDict(pairs)
        if kind == "int":
            return int(content, 16)
        if kind == "complex":
            return complex(*content)
        if kind in ("bytes", "bytearray"):
            raw = self._payload[self._place(*content) :][: content[1]]
            return bytes(raw) if kind == "bytes" else bytearray(raw)
        if kind == "tensor":
            return self._tensor(*content)
        if kind in ("array", "scalar"):
            return self._array(*content, scalar=kind == "scalar")
        if kind == "image":
            return self._image(*content)
        raise KeyError(kind)

    def _place(self, offset: int, nbytes: int) -> int:
        """Return where `nbytes` at `offset` begin in the payload."""
        if min(offset, nbytes) < 0 or self._begin + offset + nbytes > len(self._payload):
            raise ValueError("damaged payload: bytes outside of it")
        return self._begin + offset

    def _tensor(self, name: str, shape: list[int], offset: int, nbytes: int) -> Tensor:
        dtype, begin = _DTYPES[name], self._place(offset, nbytes)
        count = math.prod(shape)
        if count * dtype.itemsize != nbytes or min(shape, default=0) < 0:
            raise ValueError(f"damaged payload: {nbytes} bytes for shape {shape}")
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self._payload, dtype=dtype, count=count, offset=begin).view(shape)

    def _array(self, name: str, shape: list[int], place: list[int], scalar: bool) -> Any:
        import numpy

        dtype, begin = numpy.dtype(name), self._place(*place)
        if dtype.kind not in _ARRAY_KINDS or min(shape, default=0) < 0:
            raise TypeError(f"{name} is not a plain dtype, or {shape} is not a shape")
        if math.prod(shape) * dtype.itemsize != place[1]:
            raise ValueError(f"damaged payload: {place[1]} bytes for shape {shape}")
        if place[1] == 0:
            array = numpy.empty(shape, dtype)
        else:
            array = numpy.frombuffer(self._payload, dtype, math.prod(shape), begin).reshape(shape)
        return array[()] if scalar else array

    def _image(self, mode: str, size: list[int], palette: list[int] | None, place: list[int]) -> Any:
        from PIL import Image

        begin = self._place(*place)
        image = Image.frombytes(mode, (size[0], size[1]), bytes(self._payload[begin : begin + place[1]]))
        if palette is not None:
            image.putpalette(palette, "RGB")
        return image

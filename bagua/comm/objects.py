"""Serialisation of plain data without pickle: bytes from the network never run code.

A message is an 8-byte length, that many bytes of JSON, and the raw bytes of arrays and byte strings one after
the other. In the JSON everything but None, bool, int, float and str is an object with one key, its kind.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bagua.comm import collectives
from bagua.comm.arguments import as_bytes, check_rank
from bagua.comm.groups import Group
from bagua.comm.known_classes import describe, rebuild

__all__ = ["broadcast_object", "pack", "unpack"]

_ARRAY_KINDS = "biufcSUmM"  # numpy's dtype.kind without objects and records
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_SEQUENCE_NAMES = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
_ACCEPTED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, set, dict, "
    "torch tensors and numpy arrays, dtypes, devices, dates, times, namespaces, and named tuples and enumerations "
    "of modules, nested at will"
)


def broadcast_object(group: Group, obj: Any, src: int = 0) -> Any:
    """Broadcast rank `src`'s `obj`; `src` itself gets the same object back.

    Tensors arrive detached, on the kind of device they were on (on the CPU where there is no such device).

    Args:
        group: over CPU tensors.
        obj: on `src`, plain data: None, bool, int, float, complex, str, bytes, list, tuple, set, dict,
            tensors and numpy arrays; dtypes, devices, dates, times, argparse's and simple namespaces; named tuples and
            members of enumerations whose class all ranks have imported from a module. Nested at will. Ignored
            elsewhere.
        src: the rank whose object it is.

    Raises:
        TypeError: on all ranks, if rank `src`'s object holds anything else.
        ValueError: `src` is not a rank of the group; or, on a rank that has not imported it, names a class.
    """
    check_rank(group, "src", src)
    problem: TypeError | None = None
    message = b""
    if group.rank == src:
        try:
            message = pack(obj)
        except TypeError as error:
            problem, message = error, str(error).encode()
    if group.size > 1:
        head = torch.tensor([len(message), problem is not None], dtype=torch.int64, device="cpu")
        collectives.broadcast_(group, as_bytes(head), src)
        nbytes, failed = (int(value) for value in head)
        body = torch.frombuffer(bytearray(message) or bytearray(nbytes), dtype=torch.uint8)
        collectives.broadcast_(group, body, src)
        if group.rank != src:
            message = bytes(body.numpy())
            if failed:
                raise TypeError(message.decode())
    if problem is not None:
        raise problem
    return obj if group.rank == src else unpack(message)


def pack(obj: Any) -> bytes:
    """Bytes of plain data.

    Raises:
        TypeError: `obj` holds something else; says where.
    """
    blobs: list[bytes] = []
    outline = json.dumps(_outline(obj, blobs, "obj")).encode()
    return b"".join([len(outline).to_bytes(8, "little"), outline, *blobs])


def unpack(message: bytes) -> Any:
    """The inverse of `pack`.

    Raises:
        ValueError: the message is damaged.
    """
    nbytes = int.from_bytes(message[:8], "little")
    reader = _Reader(message, 8 + nbytes)
    try:
        return reader.build(json.loads(message[8 : 8 + nbytes]))
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"damaged message: {error}") from error


def _outline(value: Any, blobs: list[bytes], where: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in _SEQUENCE_NAMES:
        return {_SEQUENCE_NAMES[kind]: [_outline(item, blobs, f"{where}[{i}]") for i, item in enumerate(value)]}
    if kind in (dict, OrderedDict):
        pairs = [
            [_outline(key, blobs, f"a key of {where}"), _outline(item, blobs, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {"dict" if kind is dict else "ordered": pairs}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind in (bytes, bytearray):
        blobs.append(bytes(value))
        return {kind.__name__: len(value)}
    if kind in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        flat = as_bytes(value.detach().cpu().contiguous().view(-1))
        blobs.append(bytes(flat.numpy()))
        return {
            "tensor": [
                str(value.dtype).removeprefix("torch."),
                list(value.shape),
                value.device.type,
                len(blobs[-1]),
            ]
        }
    if _is_numpy(value):
        if value.dtype.kind not in _ARRAY_KINDS:
            raise TypeError(
                f"{where}: a numpy array of dtype {value.dtype} cannot be sent, only of numbers, text and times"
            )
        blobs.append(value.tobytes())
        return {
            "scalar" if kind.__name__ != "ndarray" else "array": [
                value.dtype.str,
                list(value.shape),
                len(blobs[-1]),
            ]
        }
    found = describe(value, lambda part, place: _outline(part, blobs, place), where)
    if found is not None:
        return found
    raise TypeError(f"{where}: a {kind.__module__}.{kind.__qualname__} cannot be sent; supported types: {_ACCEPTED}")


def _is_numpy(value: Any) -> bool:
    """An array (no subclass of it) or a scalar of numpy."""
    numpy = sys.modules.get("numpy")  # whoever holds one has imported it; Bagua does not need it
    return numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))


class _Reader:
    """Builds values from their outline, taking raw bytes from the message in the order of writing."""

    def __init__(self, message: bytes, begin: int) -> None:
        self._message, self._next = message, begin

    def build(self, outline: Any) -> Any:
        if not isinstance(outline, dict):
            return outline
        ((kind, content),) = outline.items()
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([self.build(item) for item in content])
        if kind in ("dict", "ordered"):
            pairs = [(self.build(key), self.build(item)) for key, item in content]
            return dict(pairs) if kind == "dict" else OrderedDict(pairs)
        if kind == "complex":
            return complex(*content)
        if kind in ("bytes", "bytearray"):
            raw = self._take(content)
            return raw if kind == "bytes" else bytearray(raw)
        if kind == "tensor":
            return self._tensor(*content)
        if kind in ("array", "scalar"):
            return self._array(*content, scalar=kind == "scalar")
        return rebuild(kind, content, self.build)

    def _take(self, nbytes: int) -> bytes:
        raw = self._message[self._next : self._next + nbytes]
        if len(raw) != nbytes:
            raise ValueError("damaged message: it is too short")
        self._next += nbytes
        return raw

    def _tensor(self, dtype_name: str, shape: list[int], device_type: str, nbytes: int) -> Tensor:
        dtype = getattr(torch, dtype_name)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{dtype_name} is not a dtype")
        raw = self._take(nbytes)
        flat = (
            torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            if raw
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        tensor = flat.view(dtype).view(shape)
        return tensor.cuda() if device_type == "cuda" and torch.cuda.is_available() else tensor

    def _array(self, dtype_name: str, shape: list[int], nbytes: int, scalar: bool) -> Any:
        import numpy

        dtype = numpy.dtype(dtype_name)
        if dtype.kind not in _ARRAY_KINDS:
            raise TypeError(f"{dtype_name} is not a plain dtype")
        array = numpy.frombuffer(self._take(nbytes), dtype).reshape(shape).copy()
        return array[()] if scalar else array

"""Which kernels run: the compiled ones in ``_native.so``, called through ctypes, or eager torch.

ctypes releases the GIL during a call, and a call uses one thread: for more, call from more threads.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from . import int4_torch, minmax_torch, sign_torch

ENV = "BAGUA_CODEC_BACKEND"
LIBRARY = Path(__file__).with_name("_native.so")
_ABI = 2
_ISAS = ("baseline", "avx2", "avx512")  # in the order of bagua_codecs_isa()
_NAMES = ("torch", "native", *(f"native-{isa}" for isa in _ISAS))

_logger = logging.getLogger("bagua")
_lock = threading.Lock()
_active: Backend | None = None


class Kernels(Protocol):
    """The three functions of a block codec, on fp32.

    ``head`` and ``codes`` are the bytes of a wire row where the header and the codes of the first block begin.
    All blocks have ``block`` elements, but the last may be ragged.

    Shapes:
        x_RC, out_RC: [R, C] fp32, last dim contiguous; wire_RW: [R, W] uint8; out_C: [C] fp32.
    """

    def encode(self, x_RC: Tensor, wire_RW: Tensor, head: int, codes: int, block: int) -> None: ...
    def decode(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor) -> None: ...
    def decode_mean(self, wire_RW: Tensor, head: int, codes: int, block: int, weight: float, out_C: Tensor) -> None: ...


@dataclass(frozen=True)
class Backend:
    """The kernels of all codecs."""

    name: str
    staged: bool  # callers pass cache-sized chunks, for the sake of the scratch
    blocks: Mapping[str, Kernels]  # by the name of the layout
    mean: Callable[[Tensor, float, Tensor], None] | None  # out_N = weight * sum of rows_RN, both CPU; None: eager


class NativeKernels:
    """The compiled kernels of one block codec and one instruction set."""

    def __init__(self, library: ctypes.CDLL, layout: str, isa: str) -> None:
        self._encode = _function(library, f"{layout}_encode_{isa}", "psssspps")
        self._decode = _function(library, f"{layout}_decode_{isa}", "ppssssps")
        self._decode_mean = _function(library, f"{layout}_decode_mean_{isa}", "ppssssfp")

    def encode(self, x_RC: Tensor, wire_RW: Tensor, head: int, codes: int, block: int) -> None:
        """Writes header and codes of each block."""
        rows, n = x_RC.shape
        wire, stride = wire_RW.data_ptr(), wire_RW.stride(0)
        self._encode(x_RC.data_ptr(), x_RC.stride(0), rows, n, block, wire + head, wire + codes, stride)

    def decode(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor) -> None:
        """Decodes each block."""
        rows, n = out_RC.shape
        wire, stride = wire_RW.data_ptr(), wire_RW.stride(0)
        self._decode(wire + head, wire + codes, stride, rows, n, block, out_RC.data_ptr(), out_RC.stride(0))

    def decode_mean(self, wire_RW: Tensor, head: int, codes: int, block: int, weight: float, out_C: Tensor) -> None:
        """Decodes, sums and scales in one pass."""
        rows, n = wire_RW.shape[0], out_C.shape[0]
        wire, stride = wire_RW.data_ptr(), wire_RW.stride(0)
        self._decode_mean(wire + head, wire + codes, stride, rows, n, block, weight, out_C.data_ptr())


class NativeMean:
    """The compiled weighted sums of rows of one instruction set."""

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self._functions = {
            dtype: _function(library, f"mean_{str(dtype).removeprefix('torch.')}_{isa}", "psssfp")
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        }

    def __call__(self, rows_RN: Tensor, weight: float, out_N: Tensor) -> None:
        """out_N = weight * sum of rows_RN."""
        rows, n = rows_RN.shape
        stride = rows_RN.stride(0) * rows_RN.element_size()
        self._functions[rows_RN.dtype](rows_RN.data_ptr(), stride, rows, n, weight, out_N.data_ptr())


_TYPES = {"p": ctypes.c_void_p, "s": ctypes.c_int64, "f": ctypes.c_float}
_LAYOUTS = {
    layout.name: kernels
    for layout, kernels in (
        (minmax_torch.LAYOUT, minmax_torch.MinMaxTorch()),
        (int4_torch.LAYOUT, int4_torch.Int4Torch()),
        (sign_torch.LAYOUT, sign_torch.SignTorch()),
    )
}
_TORCH = Backend("torch", staged=True, blocks=_LAYOUTS, mean=None)


def _function(library: ctypes.CDLL, name: str, types: str) -> Callable[..., None]:
    function = getattr(library, f"bagua_{name}")
    function.argtypes, function.restype = [_TYPES[letter] for letter in types], None
    return function


def backend() -> str:
    """Name of the kernels that CPU tensors use: "torch" or "native-" and an instruction set.

    Chosen at first use: the environment variable ``BAGUA_CODEC_BACKEND`` if set, else the fastest there is.

    Raises:
        ValueError: the variable holds no name of a backend.
        RuntimeError: it names one that cannot run here.
    """
    return _chosen().name


def available_backends() -> tuple[str, ...]:
    """The backends that can run in this process, slowest first."""
    return ("torch", *_native()[0])


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, CPU tensors of all threads use this backend; for tests and benchmarks.

    Raises:
        ValueError, RuntimeError: as `backend`.
    """
    global _active
    before, _active = _active, _find(name, "use_backend()")
    try:
        yield
    finally:
        _active = before


def kernels(device: torch.device) -> Backend:
    """The kernels for tensors on ``device``."""
    return _chosen() if device.type == "cpu" else _TORCH


def _chosen() -> Backend:
    global _active
    if _active is None:
        with _lock:
            if _active is None:
                _active = _from_environment()
    return _active


def _from_environment() -> Backend:
    name = os.environ.get(ENV)
    if name:
        return _find(name, ENV)
    found, problem = _native()
    if not found:
        _logger.warning(
            "compiled codecs are not available (%s): codecs use slower torch paths. To build them, "
            "install g++ and reinstall bagua; %s=torch silences this.",
            problem,
            ENV,
        )
        return _TORCH
    return found[max(found, key=_NAMES.index)]


def _find(name: str, source: str) -> Backend:
    if name not in _NAMES:
        raise ValueError(f"{source}: unknown codec backend {name!r}; known: {', '.join(_NAMES)}")
    if name == "torch":
        return _TORCH
    found, problem = _native()
    if name == "native" and found:
        name = max(found, key=_NAMES.index)
    if name not in found:
        why = problem or "this CPU lacks the instructions"
        here = ", ".join(available_backends())
        raise RuntimeError(f"{source}: codec backend {name!r} cannot run here ({why}); available: {here}")
    return found[name]


@functools.cache
def _native() -> tuple[dict[str, Backend], str]:
    """The compiled kernels that this CPU runs, slowest first; if there are none, why."""
    if not LIBRARY.exists():
        return {}, f"{LIBRARY.name} was not built"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        abi, level = library.bagua_codecs_abi(), library.bagua_codecs_isa()
    except (OSError, AttributeError) as error:
        return {}, f"{LIBRARY.name} cannot be loaded: {error}"
    if abi != _ABI:
        return {}, f"{LIBRARY.name} is of another version of bagua"
    return {f"native-{isa}": _backend(library, isa) for isa in _ISAS[: level + 1]}, ""


def _backend(library: ctypes.CDLL, isa: str) -> Backend:
    blocks = {layout: NativeKernels(library, layout, isa) for layout in _LAYOUTS}
    return Backend(f"native-{isa}", staged=False, blocks=blocks, mean=NativeMean(library, isa))

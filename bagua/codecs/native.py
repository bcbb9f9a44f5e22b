"""Which kernels run: the compiled ones in ``_native.so``, called through ctypes, or eager torch.

ctypes releases the GIL during a call, and a call uses one thread: for more, call from more threads.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .minmax_torch import TorchKernels

ENV = "BAGUA_CODEC_BACKEND"
LIBRARY = Path(__file__).with_name("_native.so")
_ABI = 1
_ISAS = ("baseline", "avx2", "avx512")  # in the order of bagua_codecs_isa()
_NAMES = ("torch", "native", *(f"native-{isa}" for isa in _ISAS))

_logger = logging.getLogger("bagua")
_lock = threading.Lock()
_active: Kernels | None = None


class Kernels(Protocol):
    """The three functions of min-max uint8, on fp32; see `TorchKernels` for the shapes."""

    name: str
    staged: bool

    def encode(self, x_RC: Tensor, wire_RW: Tensor, head: int, codes: int, block: int) -> None: ...
    def decode(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor) -> None: ...
    def decode_mean(self, wire_RW: Tensor, head: int, codes: int, block: int, weight: float, out_C: Tensor) -> None: ...


class NativeKernels:
    """The compiled kernels of one instruction set."""

    staged = False

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self.name = f"native-{isa}"
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        prefix = "bagua_minmax_uint8_"
        self._encode = getattr(library, f"{prefix}encode_{isa}")
        self._encode.argtypes = [pointer, size, size, size, size, pointer, pointer, size]
        self._decode = getattr(library, f"{prefix}decode_{isa}")
        self._decode.argtypes = [pointer, pointer, size, size, size, size, pointer, size]
        self._decode_mean = getattr(library, f"{prefix}decode_mean_{isa}")
        self._decode_mean.argtypes = [pointer, pointer, size, size, size, size, ctypes.c_float, pointer]
        for function in (self._encode, self._decode, self._decode_mean):
            function.restype = None

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


_TORCH = TorchKernels()


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


def kernels(device: torch.device) -> Kernels:
    """The kernels for tensors on ``device``."""
    return _chosen() if device.type == "cpu" else _TORCH


def _chosen() -> Kernels:
    global _active
    if _active is None:
        with _lock:
            if _active is None:
                _active = _from_environment()
    return _active


def _from_environment() -> Kernels:
    name = os.environ.get(ENV)
    if name:
        return _find(name, ENV)
    found, problem = _native()
    if not found:
        _logger.warning(
            "compiled codecs are not available (%s): 8-bit codecs use the slower torch path. To build them, "
            "install g++ and reinstall bagua; %s=torch silences this.",
            problem,
            ENV,
        )
        return _TORCH
    return found[max(found, key=_NAMES.index)]


def _find(name: str, source: str) -> Kernels:
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
def _native() -> tuple[dict[str, Kernels], str]:
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
    return {f"native-{isa}": NativeKernels(library, isa) for isa in _ISAS[: level + 1]}, ""

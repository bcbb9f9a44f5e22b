"""The compiled kernels in `_native.so`, called through ctypes.

ctypes releases the GIL during a call, and a call uses one thread: for more, call from more threads.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bagua.codecs.eden_torch import LAYOUTS
from bagua.codecs.kernels import Backend, Moments

__all__ = [
    "ISAS",
    "LIBRARY",
    "STREAM_AWAY_FROM",
    "NativeCorrectLate",
    "NativeDenoise",
    "NativeKernels",
    "NativeLerp",
    "NativeMean",
    "NativeRunningScale",
    "NativeTopK",
    "native_backends",
]

LIBRARY = Path(__file__).with_name("_native.so")
ISAS = ("baseline", "avx2", "avx512")  # in the order of bagua_codecs_isa()
_ABI = 12
_BLOCK_CODECS = (*LAYOUTS, "int4", "minmax_uint8", "sign")
_SCRATCH = 2048  # elements, as in blocks.h
_SAMPLE = 1 << 14  # as in top_k.cpp
# Bytes of an output from which caching it is of no use, and the same if nobody reads it soon.
_STREAM_FROM, STREAM_AWAY_FROM = 32 << 20, 1 << 20

_TYPES = {"p": ctypes.c_void_p, "s": ctypes.c_int64, "f": ctypes.c_float}


def _function(library: ctypes.CDLL, name: str, types: str, result: type | None = None) -> Callable[..., int]:
    function = getattr(library, f"bagua_{name}")
    function.argtypes, function.restype = [_TYPES[letter] for letter in types], result
    return function


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class NativeKernels:
    """The kernels of one block codec and one instruction set, see `FusedKernels` and `DifferenceKernels`."""

    def __init__(self, library: ctypes.CDLL, layout: str, isa: str) -> None:
        self._encode = _function(library, f"{layout}_encode_{isa}", "psssspps")
        self._decode = _function(library, f"{layout}_decode_{isa}", "ppssss" + "pss")
        self._decode_mean = _function(library, f"{layout}_decode_mean_{isa}", "ppssssfp")
        self._encode_feedback = _function(library, f"{layout}_encode_feedback_{isa}", "pspssss" + "pps")
        self._decode_mean_encode = _function(library, f"{layout}_decode_mean_encode_{isa}", "ppssssf" + "pppp")
        self._encode_difference = _function(library, f"{layout}_encode_difference_{isa}", "pppspsss" + "ppp")
        self._decode_add = _function(library, f"{layout}_decode_add_{isa}", "ppssss" + "pps")

    def addresses(self) -> dict[str, int]:
        """Where the kernels of an exchange lie, for compiled code that calls them itself."""
        kernels = {
            "encode": self._encode,
            "encode_feedback": self._encode_feedback,
            "decode": self._decode,
            "decode_mean": self._decode_mean,
            "decode_mean_encode": self._decode_mean_encode,
        }
        return {name: _address(kernel) for name, kernel in kernels.items()}

    def encode(self, x_RC: Tensor, wire_RW: Tensor, head: int, codes: int, block: int) -> None:
        """Write header and codes of each block."""
        rows, n = x_RC.shape
        wire, stride = wire_RW.data_ptr(), wire_RW.stride(0)
        self._encode(x_RC.data_ptr(), x_RC.stride(0), rows, n, block, wire + head, wire + codes, stride)

    def decode(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor) -> None:
        """Decode each block."""
        self._decode_to(wire_RW, head, codes, block, out_RC, _STREAM_FROM)

    def decode_away(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor) -> None:
        """Decode each block, past the caches if there are enough."""
        self._decode_to(wire_RW, head, codes, block, out_RC, STREAM_AWAY_FROM)

    def _decode_to(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor, stream_from: int) -> None:
        rows, n = out_RC.shape
        wire, stride = wire_RW.data_ptr(), wire_RW.stride(0)
        out = out_RC.data_ptr(), out_RC.stride(0)
        self._decode(wire + head, wire + codes, stride, rows, n, block, *out, stream_from)

    def decode_mean(self, wire_RW: Tensor, head: int, codes: int, block: int, weight: float, out_C: Tensor) -> None:
        """Decode, sums and scales in one pass."""
        rows, n = wire_RW.shape[0], out_C.shape[0]
        wire, stride = wire_RW.data_ptr(), wire_RW.stride(0)
        self._decode_mean(wire + head, wire + codes, stride, rows, n, block, weight, out_C.data_ptr())

    def encode_feedback(
        self, x_RN: Tensor, residual_RN: Tensor, wire_RW: Tensor, head: int, codes: int, block: int
    ) -> None:
        """Add, encodes and keeps what was lost, block by block."""
        rows, n = x_RN.shape
        wire, stride = wire_RW.data_ptr(), wire_RW.stride(0)
        x, residual = (x_RN.data_ptr(), x_RN.stride(0)), (residual_RN.data_ptr(), residual_RN.stride(0))
        self._encode_feedback(*x, *residual, rows, n, block, wire + head, wire + codes, stride)

    def decode_mean_encode(
        self,
        wire_RW: Tensor,
        head: int,
        codes: int,
        block: int,
        weight: float,
        n: int,
        residual_N: Tensor | None,
        out_1W: Tensor,
    ) -> None:
        """Decode, sums, scales and encodes, a few blocks at a time."""
        wire, stride, out = wire_RW.data_ptr(), wire_RW.stride(0), out_1W.data_ptr()
        scratch_B = _scratch(n, block)
        residual = None if residual_N is None else residual_N.data_ptr()
        rows, scratch = wire_RW.shape[0], scratch_B.data_ptr()
        source = wire + head, wire + codes, stride, rows, n, block, weight
        self._decode_mean_encode(*source, residual, scratch, out + head, out + codes)

    def encode_difference(
        self,
        x_N: Tensor,
        me_N: Tensor,
        peers_PN: Tensor,
        weights_P: Tensor,
        wire_1W: Tensor,
        head: int,
        codes: int,
        block: int,
    ) -> None:
        """Differences, encodes, decodes and adds in one pass."""
        n, wire = x_N.shape[0], wire_1W.data_ptr()
        scratch = _scratch(n, block)
        peers = peers_PN.data_ptr(), peers_PN.stride(0), weights_P.data_ptr(), peers_PN.shape[0]
        sizes = n, block, scratch.data_ptr()
        self._encode_difference(x_N.data_ptr(), me_N.data_ptr(), *peers, *sizes, wire + head, wire + codes)

    def decode_add(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RN: Tensor) -> None:
        """Decode and adds, block by block."""
        rows, n = out_RN.shape
        wire, stride = wire_RW.data_ptr(), wire_RW.stride(0)
        scratch = _scratch(n, block)
        out = out_RN.data_ptr(), out_RN.stride(0)
        self._decode_add(wire + head, wire + codes, stride, rows, n, block, scratch.data_ptr(), *out)


class NativeLerp:
    """The kernels of one block codec and one instruction set that has fused multiply-add, see `LerpKernels`."""

    def __init__(self, library: ctypes.CDLL, layout: str, isa: str) -> None:
        self._encode = _function(library, f"{layout}_encode_lerp_{isa}", "ppfpss" + "ppp")
        self._decode = _function(library, f"{layout}_decode_lerp_{isa}", "ppss" + "pf" + "pps")
        self._decode_mean = _function(library, f"{layout}_decode_mean_lerp_{isa}", "ppssssf" + "pf" + "pp")

    def addresses(self) -> dict[str, int]:
        """As `NativeKernels.addresses`."""
        kernels = {
            "encode_lerp": self._encode,
            "decode_lerp": self._decode,
            "decode_mean_lerp": self._decode_mean,
        }
        return {name: _address(kernel) for name, kernel in kernels.items()}

    def encode_lerp(
        self,
        x_M: Tensor,
        other_M: Tensor,
        weight: float,
        residual_M: Tensor | None,
        wire_1W: Tensor,
        head: int,
        codes: int,
        block: int,
    ) -> None:
        """Mix and encodes, with feedback if there is a residual, block by block."""
        n, wire = x_M.shape[0], wire_1W.data_ptr()
        scratch = _scratch(n, block)
        residual = None if residual_M is None else residual_M.data_ptr()
        source = x_M.data_ptr(), other_M.data_ptr(), weight, residual, n, block, scratch.data_ptr()
        self._encode(*source, wire + head, wire + codes)

    def decode_lerp(
        self,
        wire_1W: Tensor,
        head: int,
        codes: int,
        block: int,
        other_M: Tensor,
        weight: float,
        out_M: Tensor,
        away: bool,
    ) -> None:
        """Decode and mixes, block by block."""
        n, wire = out_M.shape[0], wire_1W.data_ptr()
        scratch = _scratch(n, block)
        mixed = other_M.data_ptr(), weight, scratch.data_ptr()
        away = away and 4 * n >= STREAM_AWAY_FROM
        self._decode(wire + head, wire + codes, n, block, *mixed, out_M.data_ptr(), away)


def _scratch(n: int, block: int) -> Tensor:
    return torch.empty(min(n, max(block, _SCRATCH)), dtype=torch.float32, device="cpu")


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


class NativeTopK:
    """The compiled top-k of one instruction set, see `kernels.TopKKernels`."""

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self._encode = _function(library, f"top_k_encode_{isa}", "psssssspsps")
        self._decode_mean = _function(library, f"top_k_decode_mean_{isa}", "pssssfpp", ctypes.c_int32)

    def encode(self, x_RN: Tensor, wire_RW: Tensor, block: int, k: int, k_rest: int) -> None:
        """Write indices and values of the k largest of each block."""
        rows, n = x_RN.shape
        per_sample = min(block, n) / _SAMPLE
        most = max(k, k_rest)
        capacity = int(2 * (most + 6 * math.sqrt(most * per_sample) + 8 * per_sample)) + 64
        scratch = torch.empty(2 * capacity, dtype=torch.int32, device="cpu")
        wire, stride = wire_RW.data_ptr(), wire_RW.stride(0)
        source = x_RN.data_ptr(), x_RN.stride(0), rows, n, block, k, k_rest
        self._encode(*source, scratch.data_ptr(), capacity, wire, stride)

    def decode_mean(self, wire_RW: Tensor, weight: float, out_N: Tensor) -> None:
        """Sum and scales in tiles.

        Raises:
            ValueError: the indices of a row are not ascending in 0..n-1: the wire is damaged.
        """
        rows, width = wire_RW.shape
        at_R = torch.empty(rows, dtype=torch.int64, device="cpu")
        wire = wire_RW.data_ptr(), wire_RW.stride(0), rows, width // 8, out_N.shape[0]
        if self._decode_mean(*wire, weight, at_R.data_ptr(), out_N.data_ptr()):
            raise ValueError(f"wire_RW holds indices that are not ascending in 0..{out_N.shape[0] - 1}")


class NativeRunningScale:
    """The compiled running scales of one instruction set, see `kernels.RunningScaleKernels`."""

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self._divide = _function(library, f"running_scale_divide_{isa}", "pspp")
        self._multiply = _function(library, f"running_scale_multiply_{isa}", "pspp")

    def divide(self, magnitude_N: Tensor, means_K: Tensor, x_N: Tensor) -> None:
        """Two passes: the scale of a window of zeros is known after the first."""
        self._divide(magnitude_N.data_ptr(), x_N.shape[0], means_K.data_ptr(), x_N.data_ptr())

    def multiply(self, magnitude_N: Tensor, means_K: Tensor, x_N: Tensor) -> None:
        """One pass."""
        self._multiply(magnitude_N.data_ptr(), x_N.shape[0], means_K.data_ptr(), x_N.data_ptr())


class _Moments(ctypes.Structure):
    """As bagua_moments in abi.h."""

    _fields_ = (
        ("second", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("begin", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("left", ctypes.c_float),
        ("floor", ctypes.c_float),
    )


class NativeDenoise:
    """What takes noise out of second moments, of one instruction set."""

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self._denoise = _function(library, f"denoise_{isa}", "ppsfps")

    def __call__(self, g_N: Tensor, magnitude_N: Tensor | None, share: float, moments: Sequence[Moments]) -> None:
        """One pass; `moments` in the order of their elements."""
        start, table = g_N.data_ptr(), (_Moments * len(moments))()
        for entry, each in zip(table, moments, strict=True):
            begin = (each.part.data_ptr() - start) // each.part.element_size()
            entry.second, entry.first = each.second.data_ptr(), each.first.data_ptr()
            entry.begin, entry.end = begin, begin + each.part.numel()
            entry.left, entry.floor = each.decay_left, each.floor
        magnitude = None if magnitude_N is None else magnitude_N.data_ptr()
        self._denoise(start, magnitude, g_N.shape[0], share, ctypes.addressof(table), len(moments))


class _LateMoments(ctypes.Structure):
    """As bagua_late_moments in abi.h."""

    _fields_ = (("tensors", ctypes.c_void_p * 6), ("numbers", ctypes.c_float * 12))


class NativeCorrectLate:
    """What corrects moments with an average that is late, of one instruction set."""

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self._correct = _function(library, f"correct_late_{isa}", "ps")

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> None:
        """One pass over the tensors of `bagua_late_moments`."""
        entry = _LateMoments()
        entry.tensors[:] = [tensor.data_ptr() for tensor in tensors]
        entry.numbers[:] = numbers
        self._correct(ctypes.addressof(entry), tensors[0].numel())


class _RoundMoments(ctypes.Structure):
    """As bagua_round_moments in abi.h."""

    _fields_ = (("tensors", ctypes.c_void_p * 6), ("numbers", ctypes.c_float * 8))


class NativeInferRound:
    """What sets moments at the end of a round of local steps, of one instruction set."""

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self._infer = _function(library, f"infer_round_{isa}", "ps")

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> None:
        """One pass over the tensors of `bagua_round_moments`."""
        entry = _RoundMoments()
        entry.tensors[:] = [tensor.data_ptr() for tensor in tensors]
        entry.numbers[:] = numbers
        self._infer(ctypes.addressof(entry), tensors[0].numel())


@functools.cache
def native_backends() -> tuple[dict[str, Backend], str]:
    """The compiled kernels that this CPU runs, slowest first; if there are none, why."""
    if not LIBRARY.exists():
        return {}, f"{LIBRARY.name} was not built"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        abi, level = library.bagua_codecs_abi(), library.bagua_codecs_isa()
    except (OSError, AttributeError) as error:
        return {}, f"{LIBRARY.name} cannot be loaded: {error}"
    if abi != _ABI:
        return {}, f"{LIBRARY.name} was built for another version of bagua"
    return {f"native-{isa}": _backend(library, isa) for isa in ISAS[: level + 1]}, ""


def _backend(library: ctypes.CDLL, isa: str) -> Backend:
    blocks = {layout: NativeKernels(library, layout, isa) for layout in _BLOCK_CODECS}
    lerp = {layout: NativeLerp(library, layout, isa) for layout in _BLOCK_CODECS} if isa != "baseline" else None
    return Backend(
        f"native-{isa}",
        blocks,
        fused=blocks,
        difference=blocks,
        lerp=lerp,
        mean=NativeMean(library, isa),
        top_k=NativeTopK(library, isa),
        running_scale=NativeRunningScale(library, isa),
        denoise=NativeDenoise(library, isa),
        correct_late=NativeCorrectLate(library, isa),
        infer_round=NativeInferRound(library, isa),
    )

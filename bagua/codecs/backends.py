"""Selection of codec kernels: compiled, Triton or eager torch."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from bagua.codecs import eden_torch, int4_torch, minmax_torch, sign_torch
from bagua.codecs.kernels import Backend
from bagua.codecs.native import ISAS, native_backends

__all__ = ["ENV", "available_backends", "backend", "kernels", "use_backend"]

ENV = "BAGUA_CODEC_BACKEND"
_NAMES = ("torch", "native", *(f"native-{isa}" for isa in ISAS), "triton")

_logger = logging.getLogger("bagua")
_lock = threading.Lock()
_default: Backend | None = None  # for CPU tensors outside every block of use_backend()

_TORCH = Backend(
    "torch",
    blocks={
        minmax_torch.LAYOUT.name: minmax_torch.MinMaxTorch(),
        int4_torch.LAYOUT.name: int4_torch.Int4Torch(),
        sign_torch.LAYOUT.name: sign_torch.SignTorch(),
        **{name: eden_torch.EdenTorch(*each) for name, each in eden_torch.LAYOUTS.items()},
    },
    staged=True,
)


def backend(device: torch.device | str = "cpu") -> str:
    """Return the name of the kernels for tensors on `device`: "torch", "native-" and an instruction set, or "triton".

    Chosen at first use. CPU: the environment variable `BAGUA_CODEC_BACKEND` if set, else the fastest there is.
    CUDA: Triton if it is installed and the variable is not "torch".

    Raises:
        ValueError: the variable is not the name of a backend.
        RuntimeError: that backend cannot run on this machine.

    Examples:
        >>> bagua.codecs.backend("cpu") in bagua.codecs.available_backends()
        True
    """
    return kernels(torch.device(device)).name


def available_backends() -> tuple[str, ...]:
    """Return the backends that CPU tensors can use in this process, slowest first.

    Examples:
        >>> "torch" in bagua.codecs.available_backends()
        True
    """
    return ("torch", *native_backends()[0])


class _Block:
    """One entry of `use_backend`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend


_own: ContextVar[_Block | None] = ContextVar("bagua_codec_backend", default=None)
_open: list[_Block] = []  # of all threads, the last one begun last


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Use the named backend within the block; for tests and benchmarks.

    The block is for the thread that enters it (its context: `contextvars`), and for the exchanges that are launched
    within it, up to their end, on whichever thread they run. Threads that are in no block of their own, such as those
    in which autograd runs the hooks of CUDA tensors, use the block that was entered last and is still open. So blocks
    of several threads may overlap, and nothing of them stays behind.

    "native" backends apply to CPU tensors only; other tensors use torch. "triton" is for CUDA tensors; with
    `TRITON_INTERPRET=1` for CPU tensors too, which is slow and serves to test the kernels.

    Raises:
        ValueError, RuntimeError: as `backend`.

    Examples:
        >>> with bagua.codecs.use_backend("torch"):
        ...     bagua.codecs.backend()
        'torch'
    """
    block = _Block(_find(name, "use_backend()"))
    token = _own.set(block)
    with _lock:
        _open.append(block)
    try:
        yield
    finally:
        with _lock:
            _open.remove(block)
        _own.reset(token)


def kernels(device: torch.device) -> Backend:
    """The kernels for tensors on `device`."""
    forced = _forced()
    if device.type == "cpu":
        return forced or _default or _chosen()
    if forced is not None:
        return forced if forced.name == "triton" and device.type == "cuda" else _TORCH
    return _on_cuda() if device.type == "cuda" else _TORCH


def _forced() -> Backend | None:
    """The backend of the block that the calling thread is in."""
    own = _own.get()
    if own is not None:
        return own.backend
    last = _open[-1:]  # one operation: another thread may leave its block meanwhile
    return last[0].backend if last else None


def _chosen() -> Backend:
    global _default
    with _lock:
        if _default is None:
            _default = _from_environment()
    return _default


def _from_environment() -> Backend:
    name = os.environ.get(ENV)
    if name:
        return _find(name, ENV)
    found, problem = native_backends()
    if not found:
        _logger.warning(
            "compiled codecs are not available (%s): codecs use slower torch paths. To build them, "
            "install g++ and reinstall bagua; %s=torch silences this.",
            problem,
            ENV,
        )
        return _TORCH
    return found[max(found, key=_NAMES.index)]


@functools.cache
def _on_cuda() -> Backend:
    if os.environ.get(ENV) == "torch":
        return _TORCH
    triton, problem = _triton()
    if triton is None:
        _logger.warning("codecs on CUDA tensors use torch's own kernels: %s. %s=torch silences this.", problem, ENV)
        return _TORCH
    _logger.info("codecs on CUDA tensors use Triton kernels")
    return triton


def _find(name: str, source: str) -> Backend:
    if name not in _NAMES:
        raise ValueError(f"{source}: unknown codec backend {name!r}; known: {', '.join(_NAMES)}")
    if name == "torch":
        return _TORCH
    if name == "triton":
        triton, problem = _triton()
        if triton is None or not _triton_runs_on_cpu():
            problem = problem or "on CPU tensors it needs TRITON_INTERPRET=1"
            raise RuntimeError(f"{source}: codec backend 'triton' cannot run here ({problem})")
        return triton
    found, problem = native_backends()
    if name == "native" and found:
        name = max(found, key=_NAMES.index)
    if name not in found:
        why = problem or "this CPU lacks the instructions"
        here = ", ".join(available_backends())
        raise RuntimeError(f"{source}: codec backend {name!r} cannot run here ({why}); available: {here}")
    return found[name]


@functools.cache
def _triton() -> tuple[Backend | None, str]:
    """Triton's kernels; if there are none, why. Imports Triton."""
    if importlib.util.find_spec("triton") is None:
        return None, "Triton is not installed"
    try:
        from bagua.codecs.triton_backend import BACKEND
    except Exception as error:  # whatever a broken or too old Triton raises at import
        return None, f"Triton cannot be used: {error}"
    return BACKEND, ""


def _triton_runs_on_cpu() -> bool:
    from bagua.codecs.triton_backend import interpreted

    return interpreted() or torch.cuda.is_available()

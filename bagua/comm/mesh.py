"""The native transport: exchanges of rows, sums and transfers in compiled code, over sockets of its own.

`_mesh.so` is called through ctypes, which releases the GIL during a call. One thread does all of an exchange: it
encodes, sends, receives and decodes, where gloo hands every transfer to a thread of its own and back.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bagua.errors import CommunicationError

__all__ = ["LIBRARY", "SUMMED", "Encoded", "Kernels", "Mesh", "Piece", "load_mesh", "why_no_mesh"]

LIBRARY = Path(__file__).with_name("_mesh.so")
_ABI = 6
_RAISED = 1  # result of a step that raised
SUMMED = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}  # numbers as in csrc/abi.h

_WRITE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
_COMBINE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
_READ = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)


class _Steps(ctypes.Structure):
    _fields_ = [("write", _WRITE), ("combine", _COMBINE), ("read", _READ), ("self", ctypes.c_void_p)]


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "peers", "means", "bytes", "mean_bytes")),
        ("swapped", ctypes.c_int32),
    ]


class _Limits(ctypes.Structure):
    _fields_ = [("bucket", ctypes.c_uint32), ("timeout_ms", ctypes.c_int64)]


class _Problem(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char * 240), ("failed_step", ctypes.c_int32)]


class Piece(ctypes.Structure):
    """A run of the payload that lies in one place; the fields are those of `Piece` in csrc/abi.h, as below."""

    _fields_ = [("lo", ctypes.c_int64), ("hi", ctypes.c_int64), ("x", ctypes.c_void_p), ("other", ctypes.c_void_p)]


class Kernels(ctypes.Structure):
    """The addresses of a codec's kernels, and its layout."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("encode", "encode_feedback", "encode_lerp", "decode", "decode_lerp")),
        *((name, ctypes.c_void_p) for name in ("decode_mean", "decode_mean_encode", "decode_mean_lerp")),
        *((name, ctypes.c_int64) for name in ("header_bytes", "code_bits", "block", "stream_from")),
    ]


class Encoded(ctypes.Structure):
    """A mean or sum with encoded rows, for `Mesh.exchange_encoded`."""

    _fields_ = [
        ("kernels", Kernels),
        ("mean_kernels", Kernels),
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("n", "c", "row_bytes", "mean_bytes", "code_end", "mean_code_end")),
        ("pieces", ctypes.POINTER(Piece)),
        ("num_pieces", ctypes.c_int64),
        ("enter", ctypes.c_float),
        ("leave", ctypes.c_float),
        ("residual", ctypes.c_void_p),
        ("chunk_residual", ctypes.c_void_p),
        ("weight", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("rows", "peers", "means", "mean_scratch")),
        ("swapped", ctypes.c_int32),
    ]


class _Sum(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("pieces", ctypes.POINTER(Piece)),
        ("num_pieces", ctypes.c_int64),
    ]


class _Transfer(ctypes.Structure):
    _fields_ = [("peer", ctypes.c_int64), ("data", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


@functools.cache
def _load() -> tuple[Any, str]:
    """The library; if there is none, why."""
    if not LIBRARY.exists():
        return None, f"{LIBRARY.name} was not built: install g++ and reinstall bagua on Linux"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        abi = library.bagua_mesh_abi()
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY.name} cannot be loaded: {error}"
    if abi != _ABI:
        return None, f"{LIBRARY.name} was built for another version of bagua"
    mesh, pointer = ctypes.c_void_p, ctypes.c_void_p
    library.bagua_mesh_new.argtypes, library.bagua_mesh_new.restype = [ctypes.c_int32, ctypes.c_int32, pointer], mesh
    library.bagua_mesh_exchange.argtypes = [mesh, pointer, pointer, pointer, pointer]
    library.bagua_mesh_round_trip_us.argtypes, library.bagua_mesh_round_trip_us.restype = [mesh], ctypes.c_int64
    library.bagua_mesh_exchange_encoded.argtypes = [mesh, pointer, pointer, pointer]
    library.bagua_mesh_sum.argtypes = [mesh, pointer, pointer, pointer]
    transfers = [pointer, ctypes.c_int64]
    library.bagua_mesh_swap.argtypes = [mesh, *transfers, *transfers, pointer, pointer]
    relay = ctypes.c_void_p
    library.bagua_relay_new.argtypes, library.bagua_relay_new.restype = [ctypes.c_int32, pointer], relay
    for name in ("quiet_us", "bytes"):
        function = getattr(library, f"bagua_relay_{name}")
        function.argtypes, function.restype = [relay], ctypes.c_int64
    ending = [f"bagua_mesh_{name}" for name in ("abort", "close", "close_copies", "free")]
    for name in (*ending, *(f"bagua_relay_{name}" for name in ("cut", "close_copies", "free"))):
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p], None
    return library, ""


def load_mesh() -> Any:
    """The library.

    Raises:
        RuntimeError: there is none; says why.
    """
    library, problem = _load()
    if library is None:
        raise RuntimeError(problem)
    return library


def why_no_mesh() -> str:
    """Why there is no native transport in this installation; "" if there is one."""
    return _load()[1]


_alive: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _close_copies() -> None:
    """In a forked child, which would otherwise keep the parent's connections open after its end."""
    for mesh in list(_alive):
        mesh.close_copies()


os.register_at_fork(after_in_child=_close_copies)


class Mesh:
    """Connections from this rank to all others, for one exchange at a time.

    Args:
        rank: this process's rank.
        fds: descriptors of connected, non-blocking sockets, by rank; taken over. That of `rank` is ignored.
        timeout_s: without a byte from a rank that is waited for, before it is given up.

    Attributes:
        bucket: number of the bucket that the next exchange belongs to. Both ends of a connection compare it.
        ranks: the members as ranks of the team; errors name the members by their place among them.
    """

    def __init__(self, rank: int, fds: Sequence[int], timeout_s: float) -> None:
        library = load_mesh()
        self.rank, self.size, self.bucket, self.ranks = rank, len(fds), 0, tuple(range(len(fds)))
        self._library, self._timeout_ms = library, max(int(1000 * timeout_s), 1)
        mesh = library.bagua_mesh_new(rank, len(fds), (ctypes.c_int32 * len(fds))(*fds))
        if not mesh:
            raise MemoryError("no memory for a mesh")
        self._mesh = mesh
        self._finalizer = weakref.finalize(self, library.bagua_mesh_free, mesh)
        self._finalizer.atexit = False
        _alive.add(self)

    @property
    def round_trip_s(self) -> float:
        """Longest round-trip time to another rank in seconds, without queues; 0 where that is not known."""
        return self._library.bagua_mesh_round_trip_us(self._mesh) / 1e6

    def exchange(
        self,
        rows: Sequence[Tensor],
        peers: Sequence[Tensor],
        write: Callable[[int], object],
        combine: Callable[[], object],
        read: Callable[[int], object],
        swapped: bool = False,
        means: Sequence[Tensor] | None = None,
    ) -> None:
        """Send row r to rank r, combine what has come into this rank's mean, and gather the means.

        Two ranks may swap both rows instead, in as many bytes and one latency. Then nothing is combined. `peers` ends
        as both ranks' versions of this rank's row, by rank, and `rows` as those of the other one's.

        Args:
            rows: contiguous CPU tensors by rank, of sizes that all ranks know.
            peers: row r becomes what rank r sent; as long as this rank's own row.
            write: `write(r)` fills row r; for this rank, row r of `peers`. If `swapped`, for the other rank this rank's
                place in `rows`.
            combine: makes this rank's row of `means` of all `peers`.
            read: `read(r)` is called when row r of `means` is there, or both versions of row r are.
            swapped: with two ranks only, and rows of one length.
            means: row r becomes what rank r has made; of sizes that all ranks know, empty where `rows` are. None: each
                takes the place of the row that was sent.

        Raises:
            CommunicationError: names the rank; the mesh is of no use then.
            BaseException: what a callback raised.
        """
        raised: list[BaseException] = []

        def guarded(step: Callable[..., object], *args: int) -> int:
            try:
                step(*args)
            except BaseException as error:  # raised again by the caller
                raised.append(error)
                return _RAISED
            return 0

        steps = _Steps(
            _WRITE(lambda _, row, out: guarded(write, row)),
            _COMBINE(lambda _: guarded(combine)),
            _READ(lambda _, row: guarded(read, row)),
            None,
        )
        num = self.size
        means = rows if means is None else means
        at = (ctypes.c_void_p * (3 * num))(*(each.data_ptr() for each in (*rows, *peers, *means)))
        sizes = (ctypes.c_int64 * (2 * num))(*(row.nbytes for row in (*rows, *means)))
        ends = (ctypes.addressof(array) + k * num * 8 for array, parts in ((at, 3), (sizes, 2)) for k in range(parts))
        where = _Rows(*ends, swapped)
        try:
            self._run(self._library.bagua_mesh_exchange, ctypes.byref(where), ctypes.byref(steps))
        except CommunicationError:
            if raised:
                raise raised[0] from None
            raise

    def exchange_encoded(self, encoded: Encoded) -> None:
        """The same without the interpreter.

        Args:
            encoded: where everything lies; the caller keeps it alive.

        Raises:
            CommunicationError: as `exchange`.
        """
        self._run(self._library.bagua_mesh_exchange_encoded, ctypes.byref(encoded))

    def sum_(self, x_N: Tensor, pieces: Sequence[tuple[int, Tensor]] = (), factor: float = 1.0) -> None:
        """Sum over all ranks in a ring, with the bits that gloo's all-reduce has. In place.

        Args:
            x_N: a contiguous CPU tensor of a type in `SUMMED`, of one size on all ranks.
            pieces: where this rank's summands lie, if not in `x_N`: its first element and a contiguous tensor of each
                run of it, in order and without gaps. fp32 alone.
            factor: of each summand, rounded to fp32, where there are `pieces`.

        Raises:
            CommunicationError: as `exchange`.
        """
        ends = [*(lo for lo, _ in pieces[1:]), x_N.numel()]
        array = (Piece * len(pieces))(
            *(Piece(lo, hi, x.data_ptr(), None) for (lo, x), hi in zip(pieces, ends, strict=False))
        )
        total = _Sum(x_N.data_ptr(), x_N.numel(), SUMMED[x_N.dtype], factor, array if pieces else None, len(pieces))
        self._run(self._library.bagua_mesh_sum, ctypes.byref(total))

    def swap(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive the given (peer, tensor) pairs all at once, those of one peer in order.

        Args:
            sends, receives: contiguous CPU tensors, of sizes that both ends know. Ranks that nothing is exchanged with
                need not take part.

        Raises:
            CommunicationError: as `exchange`.
        """
        self._run(self._library.bagua_mesh_swap, *_transfers(sends), *_transfers(receives))

    def _run(self, function: Any, *args: Any) -> None:
        limits, problem = _Limits(self.bucket, self._timeout_ms), _Problem()
        if function(self._mesh, *args, ctypes.byref(limits), ctypes.byref(problem)):
            text = problem.text.decode(errors="replace")
            if self.ranks != tuple(range(self.size)):
                text += f" (numbers are places in the group of ranks {', '.join(map(str, self.ranks))})"
            raise CommunicationError(text)

    def abort(self) -> None:
        """Shut the connections down. What is in flight fails at once, here and at the peers. From any thread."""
        if self._finalizer.alive:
            self._library.bagua_mesh_abort(self._mesh)

    def close(self) -> None:
        """Abort, and close the descriptors once no exchange is in flight. From any thread; repeating is safe."""
        if self._finalizer.alive:
            self._library.bagua_mesh_close(self._mesh)

    def close_copies(self) -> None:
        """Close the descriptors of a forked child; the parent's connections go on."""
        if self._finalizer.alive:
            self._library.bagua_mesh_close_copies(self._mesh)


def _transfers(pairs: Sequence[tuple[int, Tensor]]) -> tuple[Any, int]:
    """An array of `Transfer`, and its length."""
    array = (_Transfer * len(pairs))(*(_Transfer(peer, x.data_ptr(), x.nbytes) for peer, x in pairs))
    return array, len(pairs)

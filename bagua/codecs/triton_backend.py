"""Launch the Triton kernels. Importing this module imports Triton."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bagua.codecs import (
    eden_torch,
    int4_torch,
    minmax_torch,
    sign_torch,
    triton_eden,
    triton_int4,
    triton_minmax,
    triton_running_scale,
    triton_sign,
)
from bagua.codecs.kernels import SCALE_FLOOR, SCALE_WINDOW, Backend, Kernels
from bagua.codecs.launcher import Launcher
from bagua.codecs.trellis_torch import trellis_of

__all__ = ["BACKEND", "TritonKernels", "TritonRunningScale", "interpreted"]

_LONGEST = 8192  # elements of a block that a program holds; longer ones are for torch
_AT_ONCE = 2048  # elements of a tile


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, where they take CPU tensors."""
    return not isinstance(triton_sign.decode, triton.JITFunction)


class _Shape(NamedTuple):
    """What a kernel is told of rows and tiles.

    Attributes:
        grid: number of programs.
        sizes: of blocks.
        tile: constants, K first where there is nothing else.
        scratch: of encoding.
        block: the size of a block as a constant, if it is one.
    """

    grid: tuple[int, int, int]
    sizes: tuple[Any, ...]
    tile: tuple[int, ...]
    scratch: tuple[Tensor, ...] = ()
    block: tuple[int, ...] = ()


class TritonKernels:
    """The kernels of one block codec on CUDA tensors, see `kernels.FusedKernels`.

    Args:
        module: holds the kernels `encode` and `decode`.
        tile: blocks of a program, and elements of its tiles in each, from the size of a block.
        reference: takes the blocks that are too long.
    """

    _longest = _LONGEST

    def __init__(self, module: Any, tile: Callable[[int], tuple[int, int]], reference: Kernels) -> None:
        self._tile, self._reference = tile, reference
        self._encode, self._decode = Launcher(module.encode), Launcher(module.decode)

    def encode(self, x_RC: Tensor, wire_RW: Tensor, head: int, codes: int, block: int) -> None:
        """Write header and codes of each block."""
        if block > self._longest:
            self._reference.encode(x_RC, wire_RW, head, codes, block)
        else:
            self._run_encode(x_RC, None, None, 0.0, wire_RW, head, codes, block, x_RC.shape[1])

    def decode(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor) -> None:
        """Decode each block."""
        if block > self._longest:
            self._reference.decode(wire_RW, head, codes, block, out_RC)
        else:
            self._run_decode(wire_RW, head, codes, block, 0.0, out_RC, mean=False)

    def decode_away(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor) -> None:
        """As `decode`: a GPU has no such choice."""
        self.decode(wire_RW, head, codes, block, out_RC)

    def decode_mean(self, wire_RW: Tensor, head: int, codes: int, block: int, weight: float, out_C: Tensor) -> None:
        """Decode, sums and scales in one pass."""
        if block > self._longest:
            self._reference.decode_mean(wire_RW, head, codes, block, weight, out_C)
        else:
            self._run_decode(wire_RW, head, codes, block, weight, out_C[None], mean=True)

    def encode_feedback(
        self, x_RN: Tensor, residual_RN: Tensor, wire_RW: Tensor, head: int, codes: int, block: int
    ) -> None:
        """Add, encodes and keeps what was lost in one pass."""
        if block > self._longest:
            self._reference.encode(residual_RN.add_(x_RN), wire_RW, head, codes, block)
            decoded_RN = x_RN.new_empty(x_RN.shape, dtype=torch.float32)
            self._reference.decode(wire_RW, head, codes, block, decoded_RN)
            residual_RN.sub_(decoded_RN).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        else:
            self._run_encode(x_RN, residual_RN, None, 0.0, wire_RW, head, codes, block, x_RN.shape[1])

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
        """Decode, sums, scales and encodes in one pass."""
        residual_1N = None if residual_N is None else residual_N[None]
        if block > self._longest:
            mean_1N = wire_RW.new_empty((1, n), dtype=torch.float32)
            self._reference.decode_mean(wire_RW, head, codes, block, weight, mean_1N[0])
            if residual_1N is None:
                self._reference.encode(mean_1N, out_1W, head, codes, block)
            else:
                self.encode_feedback(mean_1N, residual_1N, out_1W, head, codes, block)
        else:
            self._run_encode(None, residual_1N, wire_RW, weight, out_1W, head, codes, block, n)

    def _run_encode(
        self,
        x_RN: Tensor | None,
        residual_RN: Tensor | None,
        from_RW: Tensor | None,
        weight: float,
        wire_RW: Tensor,
        head: int,
        codes: int,
        block: int,
        n: int,
    ) -> None:
        """Of x_RN, or of the mean of from_RW."""
        wire = _Wire(wire_RW)
        source = wire if from_RW is None else _Wire(from_RW)
        x, residual = (wire.floats if t is None else t for t in (x_RN, residual_RN))  # any: it is not read
        shape = self._shape(n, block, wire, wire_RW.shape[0], encodes=True)
        self._encode(
            wire_RW.device,
            shape.grid,
            (x, residual, source.bytes, source.floats, wire.bytes, wire.floats, *shape.scratch),
            (
                *(x, x.stride(0), residual, residual.stride(0)),
                *(source.bytes, source.floats, source.stride, source.rows, weight),
                *(wire.bytes, wire.floats, wire.stride, head, codes, n, *shape.sizes, *shape.scratch, *shape.block),
                *(from_RW is not None, residual_RN is not None, *shape.tile),
            ),
        )

    def _run_decode(
        self, wire_RW: Tensor, head: int, codes: int, block: int, weight: float, out_RN: Tensor, mean: bool
    ) -> None:
        wire, (rows, n) = _Wire(wire_RW), out_RN.shape
        shape = self._shape(n, block, wire, rows, encodes=False)
        self._decode(
            wire_RW.device,
            shape.grid,
            (wire.bytes, wire.floats, out_RN),
            (
                *(wire.bytes, wire.floats, wire.stride, wire.rows, weight),
                *(out_RN, out_RN.stride(0), head, codes, n, *shape.sizes, *shape.block, mean, *shape.tile),
            ),
        )

    def _shape(self, n: int, block: int, wire: _Wire, rows: int, encodes: bool) -> _Shape:
        num_blocks = -(-n // block)
        at_once, columns = self._tile(min(block, n))
        return _Shape((-(-num_blocks // at_once), rows, 1), (block, num_blocks), (at_once, columns))


class _EdenKernels(TritonKernels):
    """The kernels of eden, whose blocks are all short enough.

    Args:
        bits: of an element.
        states: of the trellis; 1: none.
    """

    def __init__(self, bits: int, states: int) -> None:
        super().__init__(triton_eden, _whole, eden_torch.EdenTorch(bits, states))
        self._bits, self._states, self._trellis = bits, states, trellis_of(bits, states)
        if states == 32 and not interpreted():
            self._longest = 0  # on an H200 these kernels had other bits than torch in blocks of 512; cause unknown
        self._least = eden_torch.layout_of(bits, states, 1).least
        self._tables: dict[torch.device, Tensor] = {}

    def _shape(self, n: int, block: int, wire: _Wire, rows: int, encodes: bool) -> _Shape:
        rest = eden_torch.padded(n % block, self._least) if n % block else 0
        whole = block if n >= block else rest
        longest = max(whole, 8)  # a byte of codes at least
        num_blocks = -(-n // block)
        at_once = max(1, min(_AT_ONCE // longest, triton.next_power_of_2(num_blocks)))
        factors = eden_torch.factor(whole), eden_torch.factor(max(rest, 1))
        return _Shape(
            (-(-num_blocks // at_once), rows, 1),
            (num_blocks, rest, *factors, self._table(wire)),
            (self._bits, self._states, at_once, longest, longest.bit_length() - 1),
            self._scratch(rows * num_blocks * longest, wire) if encodes else (),
            (block,),
        )

    def _table(self, wire: _Wire) -> Tensor:
        """The centroids of a trellis, int32."""
        if self._trellis is None:
            return wire.floats  # any: it is not read
        device = wire.bytes.device
        if device not in self._tables:
            self._tables[device] = torch.tensor(self._trellis.table, dtype=torch.int32, device=device)
        return self._tables[device]

    def _scratch(self, numel: int, wire: _Wire) -> tuple[Tensor, Tensor]:
        if self._trellis is None:
            return wire.floats, wire.floats
        units, decisions = torch.empty((2, numel), dtype=torch.int32, device=wire.bytes.device)
        return units, decisions


class TritonRunningScale:
    """Running scales of CUDA tensors, see `kernels.RunningScaleKernels`."""

    def __init__(self) -> None:
        self._means, self._divide = Launcher(triton_running_scale.means), Launcher(triton_running_scale.divide)
        self._multiply = Launcher(triton_running_scale.multiply)

    def divide(self, magnitude_N: Tensor, means_K: Tensor, x_N: Tensor) -> None:
        """Divide by the scales."""
        device, n = x_N.device, x_N.numel()
        grid, at_once = self._tiles(means_K)
        of_rest = SCALE_WINDOW / (n % SCALE_WINDOW or SCALE_WINDOW)
        self._means(
            device,
            grid,
            (magnitude_N, means_K),
            (magnitude_N, means_K, n, of_rest, SCALE_FLOOR / SCALE_WINDOW, at_once),
        )
        most = means_K.amax()
        self._divide(device, grid, (magnitude_N, means_K, most, x_N), (magnitude_N, means_K, most, x_N, n, at_once))

    def multiply(self, magnitude_N: Tensor, means_K: Tensor, x_N: Tensor) -> None:
        """Multiply by the scales, and move the magnitudes."""
        grid, at_once = self._tiles(means_K)
        tensors = (magnitude_N, means_K, x_N)
        self._multiply(x_N.device, grid, tensors, (*tensors, x_N.numel(), at_once))

    def _tiles(self, means_K: Tensor) -> tuple[tuple[int, int, int], int]:
        """Grid, and windows of a program."""
        at_once = _AT_ONCE // SCALE_WINDOW
        return (-(-means_K.numel() // at_once), 1, 1), at_once


def _whole(block: int) -> tuple[int, int]:
    columns = triton.next_power_of_2(block)
    return max(1, _AT_ONCE // columns), columns


def _halves(block: int) -> tuple[int, int]:
    return _whole(-(-block // 2))


def _steps(block: int) -> tuple[int, int]:
    return _AT_ONCE // 128, triton.next_power_of_2(block)


class _Wire:
    """A wire's bytes and, at the same place, its headers' numbers."""

    def __init__(self, wire_RW: Tensor) -> None:
        self.bytes, self.floats = wire_RW, wire_RW.view(torch.float32)
        self.rows, self.stride = wire_RW.shape[0], wire_RW.stride(0)


_BLOCKS = {
    minmax_torch.LAYOUT.name: TritonKernels(triton_minmax, _whole, minmax_torch.MinMaxTorch()),
    int4_torch.LAYOUT.name: TritonKernels(triton_int4, _halves, int4_torch.Int4Torch()),
    sign_torch.LAYOUT.name: TritonKernels(triton_sign, _steps, sign_torch.SignTorch()),
    **{name: _EdenKernels(*each) for name, each in eden_torch.LAYOUTS.items()},
}
BACKEND = Backend("triton", blocks=_BLOCKS, fused=_BLOCKS, running_scale=TritonRunningScale())

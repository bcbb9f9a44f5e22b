"""Protocols of codec kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = [
    "SCALE_FLOOR",
    "SCALE_WINDOW",
    "Backend",
    "DifferenceKernels",
    "FusedKernels",
    "Kernels",
    "LerpKernels",
    "Moments",
    "RunningScaleKernels",
    "TopKKernels",
]

SCALE_WINDOW = 256  # elements; the mean of their magnitudes bounds the running scale of each
SCALE_FLOOR = 0.1  # of that mean


class Kernels(Protocol):
    """The functions of a block codec, on fp32.

    `head` and `codes` are the bytes of a wire row where the header and the codes of the first block begin.
    All blocks have `block` elements, but the last may be ragged.

    Shapes:
        x_RC, out_RC: [R, C] fp32, last dim contiguous; wire_RW: [R, W] uint8; out_C: [C] fp32.
    """

    def encode(self, x_RC: Tensor, wire_RW: Tensor, head: int, codes: int, block: int) -> None: ...
    def decode(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor) -> None: ...
    def decode_mean(self, wire_RW: Tensor, head: int, codes: int, block: int, weight: float, out_C: Tensor) -> None: ...


class FusedKernels(Kernels, Protocol):
    """`Kernels` with fused operations on whole rows; see the methods of `Codec`.

    `decode_away` is `decode` into memory that is not read soon.

    Shapes:
        x_RN, residual_RN: [R, N] fp32, last dim contiguous; residual_N: [N] fp32 contiguous; out_1W: [1, W] uint8.
    """

    def decode_away(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RC: Tensor) -> None: ...
    def encode_feedback(
        self, x_RN: Tensor, residual_RN: Tensor, wire_RW: Tensor, head: int, codes: int, block: int
    ) -> None: ...
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
    ) -> None: ...


class DifferenceKernels(Protocol):
    """Fused kernels of difference gossip; see `Codec.encode_difference` and `Codec.decode_add`.

    Shapes:
        x_N, me_N: [N] fp32 contiguous; peers_PN, out_RN: [P, N] and [R, N] fp32, last dim contiguous; weights_P: [P]
        fp32; wire_1W, wire_RW: [1, W] and [R, W] uint8.
    """

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
    ) -> None: ...
    def decode_add(self, wire_RW: Tensor, head: int, codes: int, block: int, out_RN: Tensor) -> None: ...


class LerpKernels(Protocol):
    """Encoding and decoding fused with `torch.lerp`, bit for bit.

    Shapes:
        x_M, other_M, residual_M, out_M: [M] fp32 contiguous; wire_1W: [1, W] uint8.
    """

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
    ) -> None: ...
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
    ) -> None: ...


class TopKKernels(Protocol):
    """The functions of top-k, on fp32; k elements of each block, k_rest of the ragged one."""

    def encode(self, x_RN: Tensor, wire_RW: Tensor, block: int, k: int, k_rest: int) -> None: ...
    def decode_mean(self, wire_RW: Tensor, weight: float, out_N: Tensor) -> None: ...


class RunningScaleKernels(Protocol):
    """Scales of elements from the running means of their magnitudes; see `bagua.exchanges.running_scale`.

    Shapes: magnitude_N, x_N: [N] fp32 contiguous, N >= 1; means_K: [ceil(N / 256)] fp32, for `divide` an output.
    """

    def divide(self, magnitude_N: Tensor, means_K: Tensor, x_N: Tensor) -> None: ...
    def multiply(self, magnitude_N: Tensor, means_K: Tensor, x_N: Tensor) -> None: ...


@dataclass(frozen=True)
class Moments:
    """Adam's moments of a parameter whose gradient is `part` of a bucket.

    Shapes: all those of the parameter. `denoise` of a backend needs fp32 with the strides of `part`, which is dense.

    Attributes:
        decay_left: 1 - b2.
        floor: what the square of the first moment is multiplied by for the least second moment.
    """

    first: Tensor
    second: Tensor
    part: Tensor
    decay_left: float
    floor: float


@dataclass(frozen=True)
class Backend:
    """The kernels of all codecs; None: eager torch."""

    name: str
    blocks: Mapping[str, Kernels]  # by the name of the layout
    fused: Mapping[str, FusedKernels] | None = None  # the same kernels if they are fused
    difference: Mapping[str, DifferenceKernels] | None = None
    lerp: Mapping[str, LerpKernels] | None = None
    staged: bool = False  # callers pass cache-sized chunks, for the sake of the scratch
    mean: Callable[[Tensor, float, Tensor], None] | None = None  # out_N = weight * sum of rows_RN, both CPU
    top_k: TopKKernels | None = None
    running_scale: RunningScaleKernels | None = None
    denoise: Callable[[Tensor, Tensor | None, float, Sequence[Moments]], None] | None = None  # algorithms/denoising.py
    # algorithms/delayed_moments.py and algorithms/round_moments.py; fp32 tensors on a CPU, each dense and with the same
    # strides.
    correct_late: Callable[[Sequence[Tensor], Sequence[float]], None] | None = None
    infer_round: Callable[[Sequence[Tensor], Sequence[float]], None] | None = None

"""Base class of codecs.

Shape suffixes in this package: R = rows (peers), N = elements of a row, W = bytes of one wire row,
K = blocks of a row, B = elements of a block, C = columns of a chunk.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bagua.codecs.checks import (
    check_difference,
    check_dtype,
    check_fp32,
    check_has_rows,
    check_like,
    check_rows,
    check_vector,
    check_wire,
)
from bagua.codecs.chunks import CPU_CHUNK, chunks, pad4, sum_dtype
from bagua.codecs.parts import RowParts

__all__ = ["CPU_CHUNK", "Codec", "chunks", "pad4", "sum_dtype"]


@dataclass(frozen=True)
class Codec(RowParts):
    """Base class of codecs: encodes flat rows of floating-point numbers as bytes; pure, stateless, thread-safe.

    A codec is a frozen dataclass: it can be compared, hashed, printed and passed to `dataclasses.replace`.
    Each row is encoded on its own: its bytes depend neither on the other rows nor on how many there are.

    To write one, set the three class variables and implement `wire_bytes`, `_encode` and `_decode`;
    a linear codec also implements `wire_dtype`. The underscored methods get checked, detached arguments.
    """

    name: ClassVar[str]
    """Name in the registry."""
    linear: ClassVar[bool]
    """decode(sum of wires) == sum of decodes, so wires may ride an all-reduce in `wire_dtype`."""
    lossless: ClassVar[bool]
    """decode(encode(x)) == x bit for bit."""
    unbiased: ClassVar[bool] = False
    """The mean of decode(encode(x)) over the codec's random choices is x; error feedback is off by default then."""

    keeps_zeros: ClassVar[bool] = True
    """An element that is zero is decoded as zero, whatever its neighbours are."""

    @property
    def drops(self) -> bool:
        """Whether elements are left out and decode to zero; error feedback, on by default then, sends them later."""
        return False

    @abstractmethod
    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """Exact bytes of one encoded row of `n` elements of `dtype`; a multiple of 4."""

    def wire_dtype(self, dtype: torch.dtype = torch.float32) -> torch.dtype:
        """The dtype in which wires of `dtype` rows may be viewed and summed.

        Raises:
            TypeError: the codec is not linear.
        """
        raise TypeError(f"codec {self.name!r} is not linear: its wires cannot be summed")

    def encode(self, x_RN: Tensor, out: Tensor | None = None) -> Tensor:
        """Encode each row.

        Shapes:
            x_RN: [R, N], float32, float16, bfloat16 or float64, last dim contiguous, any row stride.
            out, result: [R, W] uint8 with W = `wire_bytes(N, x_RN.dtype)`; rows start 4-byte aligned.

        Bytes:
            R * W.

        Raises:
            ValueError: a dtype, shape, device or layout is not as above; the message names the argument.
        """
        check_rows("x_RN", x_RN)
        out = self._out("out", out, x_RN.shape[0], x_RN.shape[1], x_RN.dtype, x_RN.device)
        if out.numel():
            self._encode(x_RN.detach(), out)
        return out

    def decode(self, wire_RW: Tensor, n: int, out: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode each row.

        Shapes:
            wire_RW: [R, W] uint8 as made by `encode`; rows start 4-byte aligned.
            out, result: [R, n], last dim contiguous.

        Args:
            wire_RW: the encoded rows.
            n: elements of a row.
            out: where to write; its dtype is the dtype of the result.
            dtype: dtype of the result if `out` is None. A wire whose size depends on the dtype that was
                encoded (identity) must be decoded to that dtype.

        Raises:
            ValueError: a dtype, shape, device or layout is not as above; the message names the argument.
        """
        if out is None:
            check_dtype("dtype", dtype)
        else:
            check_rows("out", out)
            dtype = out.dtype
        check_wire("wire_RW", wire_RW, None, self.wire_bytes(n, dtype))
        shape = (wire_RW.shape[0], n)
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=wire_RW.device)
        elif tuple(out.shape) != shape or out.device != wire_RW.device:
            raise ValueError(f"out must be {list(shape)} on {wire_RW.device}, got {list(out.shape)} on {out.device}")
        if out.numel():
            self._decode(wire_RW, out.detach())
        return out

    def decode_mean(self, wire_RW: Tensor, n: int, out: Tensor, weight: float) -> Tensor:
        """`out = weight * sum over rows of decode(wire_RW)`, without the decoded rows in memory.

        Summed in fp32 (fp64 if `out` is), in the order of the rows; `out` must not overlap the wire.

        Shapes:
            wire_RW: [R, W] uint8, R >= 1; out, result: [n] contiguous.

        Raises:
            ValueError: a dtype, shape, device or layout is not as above; the message names the argument.
        """
        check_dtype("out", out.dtype)
        check_wire("wire_RW", wire_RW, None, self.wire_bytes(n, out.dtype))
        check_has_rows("wire_RW", wire_RW)
        check_vector("out", out, n, wire_RW.device)
        if n:
            self._decode_mean(wire_RW, out.detach(), float(weight))
        return out

    def encode_with_feedback(self, x_RN: Tensor, residual_RN: Tensor, out: Tensor | None = None) -> Tensor:
        """Encode `e = x_RN + residual_RN`; then `residual_RN = e - decode(result)`, 0 where that is not finite.

        So the error of one step is sent in later ones, and an overflow does not persist. The sum and the difference
        are taken in the dtype of `x_RN`. The same bits as add, encode, decode and subtract one after the other.

        Shapes:
            x_RN: as in `encode`; not changed.
            residual_RN: [R, N], of the dtype and device of `x_RN`, last dim contiguous; changed in place. It must
                overlap neither `x_RN` nor `out`.
            out, result: as in `encode`.

        Bytes:
            R * W.

        Raises:
            ValueError: a dtype, shape, device or layout is not as above; the message names the argument.
        """
        check_rows("x_RN", x_RN)
        check_rows("residual_RN", residual_RN)
        check_like("residual_RN", residual_RN, "x_RN", x_RN)
        out = self._out("out", out, x_RN.shape[0], x_RN.shape[1], x_RN.dtype, x_RN.device)
        if out.numel():
            self._encode_feedback(x_RN.detach(), residual_RN.detach(), out)
        return out

    def decode_mean_encode(
        self, wire_RW: Tensor, n: int, weight: float, residual_N: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Encode `weight * sum over rows of decode(wire_RW)`, with `residual_N` with error feedback.

        The same bits as `decode_mean` in fp32 and then `encode` or `encode_with_feedback`.

        Shapes:
            wire_RW: [R, W] uint8, R >= 1, of fp32 rows of `n` elements.
            residual_N: [n] fp32 contiguous; changed in place.
            out, result: [1, W] uint8, rows 4-byte aligned. Nothing may overlap.

        Bytes:
            W.

        Raises:
            ValueError: a dtype, shape, device or layout is not as above; the message names the argument.
        """
        check_wire("wire_RW", wire_RW, None, self.wire_bytes(n))
        check_has_rows("wire_RW", wire_RW)
        if residual_N is not None:
            check_fp32("residual_N", residual_N, n, wire_RW.device)
            residual_N = residual_N.detach()
        out = self._out("out", out, 1, n, torch.float32, wire_RW.device)
        if out.numel():
            self._decode_mean_encode(wire_RW, n, float(weight), residual_N, out)
        return out

    def encode_difference(
        self, x_N: Tensor, me_N: Tensor, peers_PN: Tensor, weights: Sequence[float], out: Tensor | None = None
    ) -> Tensor:
        """A step of difference gossip: encode the distance of `x_N` and the peers from `me_N`, and update both.

        d = (x - me) + sum over k of weights[k] (peers[k] - me); then me += decode(encode(d)) and x = me. The same bits
        on all backends.

        Shapes:
            x_N, me_N: [N], of one dtype, contiguous; changed in place.
            peers_PN: [P, N], of that dtype, last dim contiguous, P = `len(weights)` >= 0.
            out, result: [1, W] uint8, rows 4-byte aligned. Nothing may overlap.

        Bytes:
            W.

        Raises:
            ValueError: a dtype, shape, device or layout is not as above; the message names the argument.
        """
        check_difference(x_N, me_N, peers_PN, len(weights))
        out = self._out("out", out, 1, x_N.shape[0], x_N.dtype, x_N.device)
        if out.numel():
            self._encode_difference(x_N.detach(), me_N.detach(), peers_PN.detach(), weights, out)
        return out

    def decode_add(self, wire_RW: Tensor, out: Tensor) -> Tensor:
        """`out += decode(wire_RW)`, row by row; adds the very numbers that `encode_difference` adds to `me_N`.

        Shapes:
            wire_RW: [R, W] uint8; out, result: [R, N], last dim contiguous; it must not overlap the wire.

        Raises:
            ValueError: a dtype, shape, device or layout is not as above; the message names the argument.
        """
        check_rows("out", out)
        check_wire("wire_RW", wire_RW, out.shape[0], self.wire_bytes(out.shape[1], out.dtype), out.device)
        if out.numel():
            self._decode_add(wire_RW, out.detach())
        return out

    def _out(
        self, what: str, out: Tensor | None, rows: int, n: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        width = self.wire_bytes(n, dtype)
        if out is None:
            return torch.empty((rows, width), dtype=torch.uint8, device=device)
        check_wire(what, out, rows, width, device)
        return out

    @abstractmethod
    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        """Fill `wire_RW`, the padding too."""

    @abstractmethod
    def _decode(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        """Fill `out_RN`."""

    def _decode_mean(self, wire_RW: Tensor, out_N: Tensor, weight: float) -> None:
        """Fill `out_N`; the default decodes row by row into scratch of `n` elements."""
        row_1N = torch.empty((1, out_N.shape[0]), dtype=out_N.dtype, device=out_N.device)
        total_N = torch.zeros_like(out_N, dtype=sum_dtype(out_N.dtype))
        for wire_W in wire_RW:
            self._decode(wire_W[None], row_1N)
            total_N.add_(row_1N[0])
        out_N.copy_(total_N.mul_(weight))

    def _encode_feedback(self, x_RN: Tensor, residual_RN: Tensor, wire_RW: Tensor) -> None:
        """Fill `wire_RW` and `residual_RN`; the default needs scratch of the size of `x_RN`."""
        e_RN = residual_RN.add_(x_RN)
        self._encode(e_RN, wire_RW)
        decoded_RN = torch.empty(x_RN.shape, dtype=x_RN.dtype, device=x_RN.device)
        self._decode(wire_RW, decoded_RN)
        residual_RN.sub_(decoded_RN).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _decode_mean_encode(
        self, wire_RW: Tensor, n: int, weight: float, residual_N: Tensor | None, out_1W: Tensor
    ) -> None:
        """Fill `out_1W` and `residual_N`; the default needs scratch of `n` elements."""
        mean_N = torch.empty(n, dtype=torch.float32, device=wire_RW.device)
        self._decode_mean(wire_RW, mean_N, weight)
        if residual_N is None:
            self._encode(mean_N[None], out_1W)
        else:
            self._encode_feedback(mean_N[None], residual_N[None], out_1W)

    def _encode_difference(
        self, x_N: Tensor, me_N: Tensor, peers_PN: Tensor, weights: Sequence[float], wire_1W: Tensor
    ) -> None:
        """Fill `wire_1W`, `me_N` and `x_N`; the default needs scratch of twice `n` elements."""
        d_N = x_N - me_N
        for peer_N, weight in zip(peers_PN, weights, strict=True):
            d_N.add_((peer_N - me_N).mul_(weight))  # not with alpha=, which may round once instead of twice
        self._encode(d_N[None], wire_1W)
        self._decode_mean(wire_1W, d_N, 1.0)
        x_N.copy_(me_N.add_(d_N))

    def _decode_add(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        """Add to `out_RN`; the default needs scratch of `n` elements."""
        row_N = torch.empty_like(out_RN[0], memory_format=torch.contiguous_format)
        for wire_W, out_N in zip(wire_RW, out_RN, strict=True):
            self._decode_mean(wire_W[None], row_N, 1.0)
            out_N.add_(row_N)

"""Base class of codecs.

Shape suffixes in this package: R = rows (peers), N = elements of a row, W = bytes of one wire row,
K = blocks of a row, B = elements of a block, C = columns of a chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bagua.codecs.checks import check_dtype, check_fp32, check_rows, check_wire

__all__ = ["CPU_CHUNK", "Codec", "chunks", "pad4", "sum_dtype"]

# Elements that a CPU loop over chunks handles at once: the scratch of one chunk stays in a core's cache.
CPU_CHUNK = 1 << 18


@dataclass(frozen=True)
class Codec(ABC):
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
        if wire_RW.shape[0] < 1:
            raise ValueError("wire_RW must have at least one row")
        if tuple(out.shape) != (n,) or out.device != wire_RW.device or not out.is_contiguous():
            raise ValueError(
                f"out must be a contiguous [{n}] on {wire_RW.device}, got {list(out.shape)} with strides "
                f"{out.stride()} on {out.device}"
            )
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
        if (residual_RN.shape, residual_RN.dtype, residual_RN.device) != (x_RN.shape, x_RN.dtype, x_RN.device):
            raise ValueError(
                f"residual_RN must match x_RN, {x_RN.dtype} {list(x_RN.shape)} on {x_RN.device}, got "
                f"{residual_RN.dtype} {list(residual_RN.shape)} on {residual_RN.device}"
            )
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
        if wire_RW.shape[0] < 1:
            raise ValueError("wire_RW must have at least one row")
        if residual_N is not None:
            check_fp32("residual_N", residual_N, n, wire_RW.device)
            residual_N = residual_N.detach()
        out = self._out("out", out, 1, n, torch.float32, wire_RW.device)
        if out.numel():
            self._decode_mean_encode(wire_RW, n, float(weight), residual_N, out)
        return out

    def part_numel(self, device: torch.device) -> int | None:
        """Alignment, in elements, of fp32 row parts for `encode_part` and `decode_part`; None if unsupported."""
        return None

    def part_lerps(self, device: torch.device) -> bool:
        """Whether `encode_part` and `decode_part` take a `lerp`."""
        return False

    def encode_part(
        self,
        x_M: Tensor,
        wire_W: Tensor,
        start: int,
        n: int,
        residual_M: Tensor | None = None,
        lerp: tuple[Tensor, float] | None = None,
    ) -> None:
        """Encode elements `start` to `start + M` of a row of `n` into their places, with feedback if asked to.

        A row that is encoded in parts, in any order, has the bytes of one that is encoded at once.

        Args:
            lerp: encode `torch.lerp(x_M, *lerp)` instead, without it in memory. Its tensor is like `x_M`.

        Shapes:
            x_M, residual_M: [M] fp32 contiguous; as in `encode_with_feedback`.
            wire_W: [W] uint8, W = `wire_bytes(n)`, 4-byte aligned.

        Raises:
            ValueError: a part that begins or ends within a block, or a shape that is not as above.
            TypeError: the codec cannot: `part_numel` is None, or there is a `lerp` and not `part_lerps`.
        """
        m = self._check_part("x_M", x_M, wire_W, start, n)
        if residual_M is not None:
            check_fp32("residual_M", residual_M, m, x_M.device)
            residual_M = _plain(residual_M)
        if m:
            self._encode_part(_plain(x_M), residual_M, wire_W, start, n, self._check_lerp(lerp, x_M))

    def decode_part(
        self,
        wire_W: Tensor,
        start: int,
        n: int,
        out_M: Tensor,
        *,
        soon: bool = True,
        lerp: tuple[Tensor, float] | None = None,
    ) -> None:
        """Decode elements `start` to `start + M` of a row of `n`; shapes and errors as in `encode_part`.

        Args:
            soon: `out_M` is read again soon. If not, a large part is written past the caches.
            lerp: `out_M` becomes `torch.lerp(decoded, *lerp)`.
        """
        if self._check_part("out_M", out_M, wire_W, start, n):
            self._decode_part(wire_W, start, n, _plain(out_M), soon, self._check_lerp(lerp, out_M))

    def _check_lerp(self, lerp: tuple[Tensor, float] | None, part_M: Tensor) -> tuple[Tensor, float] | None:
        if lerp is None:
            return None
        if not self.part_lerps(part_M.device):
            raise TypeError(f"codec {self.name!r} cannot mix parts of a row on {part_M.device}")
        check_fp32("lerp", lerp[0], part_M.numel(), part_M.device)
        return _plain(lerp[0]), lerp[1]

    def _check_part(self, name: str, part_M: Tensor, wire_W: Tensor, start: int, n: int) -> int:
        align = self.part_numel(part_M.device)
        if align is None:
            raise TypeError(f"codec {self.name!r} cannot encode parts of a row on {part_M.device}")
        m = part_M.numel()
        check_fp32(name, part_M, m, wire_W.device)
        if start < 0 or start % align or start + m > n or (m % align and start + m != n):
            raise ValueError(f"{name}: elements {start} to {start + m} of {n} are not whole blocks of {align}")
        if wire_W.dtype != torch.uint8 or wire_W.shape != (self.wire_bytes(n),) or not wire_W.is_contiguous():
            raise ValueError(f"wire_W must be a contiguous [{self.wire_bytes(n)}] uint8, got {list(wire_W.shape)}")
        return m

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
        check_rows("x_N", x_N[None])
        check_rows("peers_PN", peers_PN)
        for what, tensor, shape in (
            ("me_N", me_N, x_N.shape),
            ("peers_PN", peers_PN, torch.Size((len(weights), *x_N.shape))),
        ):
            if (tensor.shape, tensor.dtype, tensor.device) != (shape, x_N.dtype, x_N.device):
                raise ValueError(
                    f"{what} must be {x_N.dtype} {list(shape)} on {x_N.device}, got {tensor.dtype} "
                    f"{list(tensor.shape)} on {tensor.device}"
                )
        check_rows("me_N", me_N[None])
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

    def _encode_part(
        self,
        x_M: Tensor,
        residual_M: Tensor | None,
        wire_W: Tensor,
        start: int,
        n: int,
        lerp: tuple[Tensor, float] | None,
    ) -> None:
        raise NotImplementedError

    def _decode_part(
        self, wire_W: Tensor, start: int, n: int, out_M: Tensor, soon: bool, lerp: tuple[Tensor, float] | None
    ) -> None:
        raise NotImplementedError

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


def _plain(x: Tensor) -> Tensor:
    """`x` detached; calls `detach` only where needed, which costs 1 to 2 us per part."""
    return x.detach() if x.requires_grad else x


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunks(n: int, block: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges that cover `n` elements, whole blocks each: one range, except on CPU."""
    size = max(CPU_CHUNK // block, 1) * block if device.type == "cpu" else max(n, 1)
    for lo in range(0, n, size):
        yield lo, min(lo + size, n)


def pad4(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of 4."""
    return (num_bytes + 3) // 4 * 4

"""Block codecs: each block of a row has a header, each element a code of fixed width."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bagua.codecs import backends
from bagua.codecs.base import Codec
from bagua.codecs.chunks import chunks, pad4
from bagua.codecs.layout import Layout

__all__ = ["BlockCodec"]


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Base of block codecs. An encoded row is the headers of all blocks, the codes of all elements, and zero padding.

    What is done to one block is in the kernels of `layout`, on fp32: rows of other dtypes go through fp32.

    Args:
        block: elements of a block; None: the whole row is one block.
    """

    linear: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    layout: ClassVar[Layout]

    block: int | None

    @abstractmethod
    def __post_init__(self) -> None:
        """Raise ValueError unless `block` suits the layout: every whole block fills whole bytes."""

    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """Exact bytes of one row, see `Codec.wire_bytes`."""
        return pad4(self.code_end(n))

    def code_end(self, n: int) -> int:
        """Bytes of a row of `n` elements before its padding."""
        return self._at(n, n)[1]

    def _at(self, i: int, n: int) -> tuple[int, int]:
        """Bytes of a row of `n` elements where header and codes of the block that begins at `i` are."""
        block, header = self.block or max(n, 1), self.layout.header_bytes
        return -(-i // block) * header, -(-n // block) * header + self.layout.code_bytes(i)

    def _encode(self, x_RN: Tensor, wire_RW: Tensor) -> None:
        backend, n = backends.kernels(x_RN.device), x_RN.shape[1]
        for lo, hi in self._parts(x_RN, backend.staged):
            x_RC = x_RN if hi - lo == n else x_RN[:, lo:hi]
            backend.blocks[self.layout.name].encode(x_RC.to(torch.float32), wire_RW, *self._at(lo, n), self.block or n)
        self._pad(wire_RW, n)

    def _encode_feedback(self, x_RN: Tensor, residual_RN: Tensor, wire_RW: Tensor) -> None:
        fused, n = backends.kernels(x_RN.device).fused, x_RN.shape[1]
        if fused is None or x_RN.dtype != torch.float32:
            super()._encode_feedback(x_RN, residual_RN, wire_RW)
            return
        block, at = self.block or n, self._at(0, n)
        fused[self.layout.name].encode_feedback(x_RN, residual_RN, wire_RW, *at, block)
        self._pad(wire_RW, n)

    def _decode_mean_encode(
        self, wire_RW: Tensor, n: int, weight: float, residual_N: Tensor | None, out_1W: Tensor
    ) -> None:
        fused = backends.kernels(wire_RW.device).fused
        if fused is None:
            super()._decode_mean_encode(wire_RW, n, weight, residual_N, out_1W)
            return
        block, at = self.block or n, self._at(0, n)
        fused[self.layout.name].decode_mean_encode(wire_RW, *at, block, weight, n, residual_N, out_1W)
        self._pad(out_1W, n)

    def _encode_difference(
        self, x_N: Tensor, me_N: Tensor, peers_PN: Tensor, weights: Sequence[float], wire_1W: Tensor
    ) -> None:
        kernels, n = backends.kernels(x_N.device).difference, x_N.shape[0]
        if kernels is None or x_N.dtype != torch.float32:
            super()._encode_difference(x_N, me_N, peers_PN, weights, wire_1W)
            return
        weights_P = torch.tensor(weights, dtype=torch.float32, device="cpu")
        where = wire_1W, *self._at(0, n), self.block or n
        kernels[self.layout.name].encode_difference(x_N, me_N, peers_PN, weights_P, *where)
        self._pad(wire_1W, n)

    def _decode_add(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        kernels, n = backends.kernels(out_RN.device).difference, out_RN.shape[1]
        if kernels is None or out_RN.dtype != torch.float32:
            super()._decode_add(wire_RW, out_RN)
            return
        kernels[self.layout.name].decode_add(wire_RW, *self._at(0, n), self.block or n, out_RN)

    def part_numel(self, device: torch.device) -> int | None:
        """A block, on a CPU whose kernels are fused; a part would need a wire of its own otherwise."""
        return self.block if device.type == "cpu" and backends.kernels(device).fused is not None else None

    def part_lerps(self, device: torch.device) -> bool:
        """On a CPU with fused multiply-add, and compiled kernels."""
        return self.part_numel(device) is not None and backends.kernels(device).lerp is not None

    def _encode_part(
        self,
        x_M: Tensor,
        residual_M: Tensor | None,
        wire_W: Tensor,
        start: int,
        n: int,
        lerp: tuple[Tensor, float] | None,
    ) -> None:
        backend, at, block = backends.kernels(x_M.device), self._at(start, n), self.block or n
        if lerp is not None:
            assert backend.lerp is not None
            backend.lerp[self.layout.name].encode_lerp(x_M, *lerp, residual_M, wire_W[None], *at, block)
        elif residual_M is None:
            backend.blocks[self.layout.name].encode(x_M[None], wire_W[None], *at, block)
        else:
            assert backend.fused is not None
            backend.fused[self.layout.name].encode_feedback(x_M[None], residual_M[None], wire_W[None], *at, block)
        if start + x_M.numel() == n:
            self._pad(wire_W[None], n)

    def _decode_part(
        self, wire_W: Tensor, start: int, n: int, out_M: Tensor, soon: bool, lerp: tuple[Tensor, float] | None
    ) -> None:
        backend, at, block = backends.kernels(wire_W.device), self._at(start, n), self.block or n
        if lerp is not None:
            assert backend.lerp is not None
            backend.lerp[self.layout.name].decode_lerp(wire_W[None], *at, block, *lerp, out_M, not soon)
            return
        assert backend.fused is not None
        kernels = backend.fused[self.layout.name]
        decode = kernels.decode if soon else kernels.decode_away
        decode(wire_W[None], *at, block, out_M[None])

    def _pad(self, wire_RW: Tensor, n: int) -> None:
        end = self.code_end(n)
        if end < wire_RW.shape[1]:
            wire_RW[:, end:].zero_()

    def _decode(self, wire_RW: Tensor, out_RN: Tensor) -> None:
        backend, n = backends.kernels(wire_RW.device), out_RN.shape[1]
        for lo, hi in self._parts(out_RN, backend.staged):
            out_RC = out_RN if hi - lo == n else out_RN[:, lo:hi]
            y_RC = _fp32_like(out_RC)
            backend.blocks[self.layout.name].decode(wire_RW, *self._at(lo, n), self.block or n, y_RC)
            if y_RC is not out_RC:
                out_RC.copy_(y_RC)

    def _decode_mean(self, wire_RW: Tensor, out_N: Tensor, weight: float) -> None:
        backend, n = backends.kernels(wire_RW.device), out_N.shape[0]
        for lo, hi in self._parts(out_N, backend.staged):
            out_C = out_N if hi - lo == n else out_N[lo:hi]
            y_C = _fp32_like(out_C)
            kernels, (head, codes) = backend.blocks[self.layout.name], self._at(lo, n)
            kernels.decode_mean(wire_RW, head, codes, self.block or n, weight, y_C)
            if y_C is not out_C:
                out_C.copy_(y_C)

    def _parts(self, x: Tensor, staged: bool) -> Iterable[tuple[int, int]]:
        """Ranges of whole blocks of `x`: one range, unless scratch is needed."""
        n = x.shape[-1]
        if not staged and x.dtype == torch.float32:
            return ((0, n),)
        return chunks(n, self.block or n, x.device)


def _fp32_like(x: Tensor) -> Tensor:
    """`x` itself if it is fp32, else scratch of its shape."""
    return x if x.dtype == torch.float32 else torch.empty(x.shape, dtype=torch.float32, device=x.device)

"""Rows that are encoded and decoded in parts: optional for a codec. Shape suffixes as in `bagua.codecs.base`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from bagua.codecs.checks import check_fp32, check_part

__all__ = ["RowParts"]


class RowParts(ABC):
    """The operations of a codec on a part of a row: an exchange encodes what it reads while it is in a cache.

    A codec that can overrides `part_numel`, `_encode_part` and `_decode_part`; by default it cannot.
    """

    name: ClassVar[str]

    @abstractmethod
    def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """Exact bytes of one encoded row."""

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
        check_part(name, part_M, wire_W, start, n, align, self.wire_bytes(n))
        return part_M.numel()

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


def _plain(x: Tensor) -> Tensor:
    """`x` detached; calls `detach` only where needed, which costs 1 to 2 us per part."""
    return x.detach() if x.requires_grad else x

"""Differentiable exchange of rows with the ranks of their experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bagua.codecs import Codec
from bagua.moe.spread import Spread

__all__ = ["exchange_tokens"]


def exchange_tokens(
    rows_TM: Tensor,
    spread: Spread,
    to: tuple[int, ...],
    fro: tuple[int, ...],
    codec: Codec | None = None,
    grad_codec: Codec | None = None,
    grad_scale: float = 1.0,
) -> Tensor:
    """Differentiable `Spread.exchange`. Collective, and so is its backward pass.

    Args:
        rows_TM, spread, to, fro, codec: as there. The gradient takes the codec as the identity.
        grad_codec: of the gradient's rows.
        grad_scale: what the gradient is multiplied with on its way back.

    Returns:
        Rows [U, M].
    """
    result: Any = _ExchangeTokens.apply(rows_TM, spread, to, fro, codec, grad_codec, 1.0, grad_scale)
    return result


class _ExchangeTokens(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        rows_TM: Tensor,
        spread: Spread,
        to: tuple[int, ...],
        fro: tuple[int, ...],
        codec: Codec | None,
        grad_codec: Codec | None,
        scale: float,
        grad_scale: float,
    ) -> Tensor:
        ctx.given = spread, to, fro, codec, grad_codec, scale, grad_scale
        out_UM = spread.exchange(rows_TM, to, fro, codec)
        return out_UM if scale == 1 else out_UM.mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad_UM: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        spread, to, fro, codec, grad_codec, scale, grad_scale = ctx.given
        grad_TM = _ExchangeTokens.apply(grad_UM, spread, fro, to, grad_codec, codec, grad_scale, scale)
        return grad_TM, None, None, None, None, None, None, None

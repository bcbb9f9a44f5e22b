"""Encoded rows over the native transport: where everything lies, for the compiled exchange."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bagua.codecs import backends
from bagua.codecs.base import Codec
from bagua.codecs.blocks import BlockCodec
from bagua.codecs.kernels import Backend
from bagua.codecs.native import STREAM_AWAY_FROM, NativeKernels, NativeLerp
from bagua.comm.mesh import Encoded, Kernels, Piece
from bagua.exchanges.payload_source import PayloadSource

__all__ = ["NativeRows"]


@dataclass(eq=False)
class NativeRows:
    """The description of one exchange, and what it points at.

    Attributes:
        encoded: for `Mesh.exchange_encoded`.
        kept: tensors and arrays that must live until it has run.
    """

    encoded: Encoded
    kept: Sequence[object]

    @classmethod
    def of(
        cls,
        codec: Codec,
        source: PayloadSource,
        residual_N: Tensor | None,
        chunk_residual_C: Tensor | None,
        c: int,
        weight: float,
        wire_RW: Tensor,
        peers_RW: Tensor,
        swapped: bool = False,
        gather: tuple[Codec, Tensor, Tensor] | None = None,
    ) -> NativeRows | None:
        """Describe a mean of encoded rows.

        None where the steps need the interpreter: other kernels than the compiled ones, or a hook that is no `LerpHook`
        of all elements. Transfers are the same then, so ranks may differ in it.

        Args:
            codec: one that `takes_parts`.
            source: of the payload, fp32 on a CPU.
            residual_N, chunk_residual_C: errors to feed back, or None.
            c: elements of a row.
            weight: of the sum over ranks.
            wire_RW, peers_RW: encoded rows, [R, W] contiguous.
            swapped: two ranks swap their versions of both rows.
            gather: another codec for the means, [R, W] for them, contiguous, and [c] fp32 scratch; None: means are
                encoded as rows are, and take their places.
        """
        made, means_RW, scratch_C = (codec, wire_RW, None) if gather is None else gather
        if not isinstance(codec, BlockCodec) or not isinstance(made, BlockCodec):
            return None
        mixed, backend = source.mixed_pieces(), backends.kernels(source.x_N.device)
        lerps = mixed is not None and mixed.weights is not None
        kernels, mean_kernels = _kernels(backend, codec, lerps), _kernels(backend, made, lerps)
        if mixed is None or kernels is None or mean_kernels is None:
            return None
        enter, leave = mixed.weights or (0.0, 0.0)
        pieces = (Piece * len(mixed.pieces))(
            *(
                Piece(piece.lo, piece.hi, piece.x.data_ptr(), None if other is None else other.data_ptr())
                for piece, other in mixed.pieces
            )
        )
        encoded = Encoded(
            kernels=kernels,
            mean_kernels=mean_kernels,
            x=source.x_N.data_ptr(),
            n=source.x_N.numel(),
            c=c,
            row_bytes=wire_RW.shape[1],
            mean_bytes=means_RW.shape[1],
            code_end=codec.code_end(c),
            mean_code_end=made.code_end(c),
            pieces=pieces,
            num_pieces=len(pieces),
            enter=enter,
            leave=leave,
            residual=_address(residual_N),
            chunk_residual=_address(chunk_residual_C),
            weight=weight,
            rows=wire_RW.data_ptr(),
            peers=peers_RW.data_ptr(),
            means=means_RW.data_ptr(),
            mean_scratch=_address(scratch_C),
            swapped=swapped,
        )
        return cls(encoded, (pieces, mixed, source, residual_N, chunk_residual_C, wire_RW, peers_RW, gather))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.lru_cache(maxsize=64)
def _addresses(kernels: NativeKernels, lerp: NativeLerp | None) -> dict[str, int]:
    return {**kernels.addresses(), **(lerp.addresses() if lerp is not None else {})}


def _kernels(backend: Backend, codec: BlockCodec, lerps: bool) -> Kernels | None:
    """The addresses of the codec's kernels; None if they are not compiled."""
    layout = codec.layout
    kernels = backend.blocks[layout.name]
    lerp = backend.lerp[layout.name] if backend.lerp is not None else None
    if not isinstance(kernels, NativeKernels) or codec.block is None:
        return None
    if lerp is not None and not isinstance(lerp, NativeLerp):
        return None
    if lerps and lerp is None:
        return None
    return Kernels(
        **_addresses(kernels, lerp),
        header_bytes=layout.header_bytes,
        code_bits=layout.code_bits,
        block=codec.block,
        stream_from=STREAM_AWAY_FROM,
    )

"""PowerSGD: mean over all ranks in low-rank form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bagua.codecs import Codec, Identity
from bagua.exchanges.base import State
from bagua.exchanges.low_rank import Factored, LowRank, inverse_size

__all__ = ["PowerSGD", "rank_for_shape"]

_LARGE = 2.0**32


@dataclass(frozen=True)
class PowerSGD(LowRank):
    """Mean over ranks, with each large matrix M of the bucket replaced by a low-rank P Q^T.

    P = mean(M Q); P = orthonormalise(P); Q = mean(M^T P); M' = P Q^T. Q starts from the step before. All P of the
    bucket ride one all-reduce, all Q and what is not compressed ride a second one. With error feedback,
    M += e before and e = M - P (M^T P)^T after, with the rank's own M^T P: with the mean in its place the result
    would be the same, but the differences between ranks would accumulate in e.

    The work is done in fp32 (fp64 for fp64 payloads). Vectors, and matrices for which
    `min_compression * r * (n + m) > n * m`, are averaged exactly. Householder QR yields orthonormal columns for
    any P, so a zero or rank-deficient gradient cannot leave dead columns behind. A Q with elements beyond 2^32 is kept
    times a power of two that makes them small, so that squares of large gradients do not overflow.

    Args:
        shapes: (n, m) of each parameter, in the order of the bucket; (1, n) for a vector.
        rank: columns of P and Q; at most min(n, m) are used. None (default): `rank_for_shape` of each matrix.
        error_feedback: add the compression error of one step to the next.
        min_compression: compress a matrix only if P and Q have at least this many times fewer elements than it.
        codec: of P, Q and what is not compressed: identity or bf16. Errors of rounding are not fed back.

    State: `right`, all Q^T; with error feedback `error`, one element for each one that is compressed.
    Bytes: 2 (R-1)/R times 4 bytes for each element of P, Q and the rest, sent per rank; 2 bytes with bf16.
    Source: arXiv:1905.13727 (PowerSGD), algorithms 1 and 2.
    Differs: QR instead of Gram-Schmidt; factors in bf16.

    Examples:
        >>> exchange = bagua.exchanges.PowerSGD(shapes=((64, 32),), rank=4)
    """

    shapes: tuple[tuple[int, int], ...]
    rank: int | None = None
    error_feedback: bool = True
    min_compression: float = 2.0
    codec: Codec = field(default_factory=Identity, repr=False)  # saved states fit any

    def __post_init__(self) -> None:
        rank = self.rank
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise ValueError(f"rank: expected an integer >= 1, or None for a rank by shape, got {rank!r}")
        ratio = self.min_compression
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio < math.inf:
            raise ValueError(f"min_compression: expected a number > 0, got {ratio!r}")
        self._check_codec()

    @property
    def name(self) -> str:
        """power_sgd, the rank, and whether errors are fed back."""
        rank = "by shape" if self.rank is None else self.rank
        codec = "" if self.codec.lossless else f", {self.codec.name}"
        return f"power_sgd[rank {rank}{codec}{', error feedback' if self.error_feedback else ''}]"

    @property
    def lossy(self) -> bool:
        """Unless there is nothing to compress."""
        return bool(self._layout.matrices) or not self.codec.lossless

    @property
    def fed_back(self) -> tuple[str, ...]:
        """The errors. The right factors of a former step are as good as random ones, which all ranks have alike."""
        return ("error",) if self.error_feedback else ()

    @property
    def kept(self) -> str:
        """The errors, if they are fed back."""
        return "error" if self.error_feedback else ""

    def rank_of(self, n: int, m: int) -> int:
        """Return the rank at which a matrix [n, m] is exchanged; 0 if it is averaged exactly.

        Examples:
            >>> exchange = bagua.exchanges.PowerSGD(shapes=((64, 32), (1, 64)), rank=4)
            >>> exchange.rank_of(64, 32), exchange.rank_of(1, 64)
            (4, 0)
        """
        r = rank_for_shape(n, m) if self.rank is None else min(self.rank, n, m)
        return r if min(n, m) > 1 and self.min_compression * r * (n + m) <= n * m else 0

    def _keep(self, factored: Sequence[Factored], state: State, finite: bool) -> None:
        """The errors."""
        if not self.error_feedback:
            return
        for each in factored:
            each.matrix.addmm_(each.left, each.right, alpha=-1)
        if not finite:  # an overflowed step is skipped by the GradScaler; its NaN must not come back forever
            state["error"].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _finish(self, factored: Sequence[Factored], old_Q: Tensor, new_Q: Tensor) -> None:
        """The next step starts from here."""
        old_Q.copy_(torch.where(new_Q.isfinite(), new_Q, old_Q))
        if old_Q.device.type == "cpu" and float(torch.linalg.vector_norm(old_Q, math.inf)) <= _LARGE:
            return
        # Q has the size of M: their product overflows where the square of M does. Only the directions of Q matter.
        places = [each.place for each in factored]
        rights = [old_Q[each.right : each.right + each.m * each.r] for each in places]
        norms = torch.stack(torch._foreach_norm(rights, math.inf))
        scales = torch.where(norms > _LARGE, inverse_size(norms), 1.0)
        for right, scale in zip(rights, scales.unbind(), strict=True):
            right.mul_(scale)


def rank_for_shape(n: int, m: int) -> int:
    """Return the rank for a matrix [n, m]: the root of the shorter side (docs/algorithms/power_sgd.md has figures)."""
    return round(math.sqrt(min(n, m)))

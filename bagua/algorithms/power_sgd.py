"""PowerSGD: gradients compressed to low rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from bagua import codecs, exchanges
from bagua.algorithms.base import Algorithm, Bucket, Context, Exactness, LostStep
from bagua.algorithms.nodes import fit_hierarchy
from bagua.algorithms.registry import register
from bagua.codecs import Codec
from bagua.exchanges import AllReduce, Exchange, Hierarchical
from bagua.exchanges.low_rank import TYPICAL, matrix_shape, typical_bytes

__all__ = ["PowerSGD"]


@register
@dataclass(frozen=True)
class PowerSGD(Algorithm):
    """Every rank steps with the same low-rank approximation of the mean gradient, matrix by matrix.

    A parameter counts as a matrix [first dimension, all others] (dimensions of one element left out). Vectors
    and small matrices are averaged exactly (`bagua.exchanges.PowerSGD`). The gradients of the first steps change
    fast and should not be compressed: `Warmup(1000, "gradient_allreduce", "power_sgd")`.

    Args:
        rank: rank of the approximation. None (default): by shape, see `bagua.exchanges.PowerSGD`; a notice in
            `bagua.stats` and in the log says which. Or one for all matrices.
        error_feedback: add the compression error of one step to the next; one fp32 element of state per compressed
            element. Without it most models do not converge.
        min_compression: compress a matrix only if that makes it at least this many times smaller.
        codec: "identity" or "bf16", for the factors and for what is not compressed. None (default): "bf16" for ranks
            by shape, "identity" for a given rank.
        hierarchical: sum within each node first, low rank among the nodes' leaders. None (default) does so
            where there are several nodes of which one has several ranks.

    Bytes: 2 (R-1)/R times 4 r (n + m) bytes for a matrix of n x m elements, instead of 4 n m. The figure of
        `available()` is that of 1024 x 1024 matrices, r/512 of an all-reduce; for a model of your own see
        `bagua.stats`.
    Source: arXiv:1905.13727 (PowerSGD), algorithms 1 and 2; one round of power iteration, warm start.
    Differs: QR instead of Gram-Schmidt; the steps of a bucket run straight on the lane, one all-reduce for all P
        and one for all Q, so any number of buckets may be in flight.

    Examples:
        >>> algorithm = bagua.algorithms.PowerSGD(rank=8)
        >>> model = bagua.distribute(model, optimizer, algorithm)
    """

    name: ClassVar[str] = "power_sgd"
    summary: ClassVar[str] = "gradients averaged as low-rank factors, with error feedback"
    exactness: ClassVar[Exactness] = Exactness.LOSSY
    lost_step: ClassVar[LostStep | None] = LostStep.SKIP

    rank: int | None = None
    error_feedback: bool = True
    min_compression: float = 2.0
    hierarchical: bool | None = None
    codec: str | Codec | None = None

    def __post_init__(self) -> None:
        _low_rank(self, (TYPICAL,))  # refuse bad options now, not in the middle of a run
        object.__setattr__(self, "min_compression", float(self.min_compression))

    @property
    def effective_options(self) -> Mapping[str, object]:
        """The codec, which depends on `rank`."""
        return {"codec": _codec(self)}

    def exchange_for(self, bucket: Bucket) -> Exchange:
        """The exchange that knows the matrices of `bucket`."""
        return self.exchange_of(tuple(matrix_shape(param) for param in bucket.params))

    def exchange_of(self, shapes: tuple[tuple[int, int], ...]) -> Exchange:
        """The exchange of a bucket whose parameters are matrices of these shapes; vectors are (1, n)."""
        return _exchange(self, shapes)

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Hierarchical by default where there is a hierarchy."""
        return fit_hierarchy(self, nodes, default=True)

    @property
    def hierarchical_groups(self) -> bool:
        """As the option says."""
        return bool(self.hierarchical)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """A typical figure: as if all `n` elements lay in matrices of 1024 x 1024."""
        return typical_bytes(_exchange(self, (TYPICAL,)), n, size)

    def setup(self, ctx: Context) -> None:
        """One exchange for each bucket, for its shapes."""
        for bucket in ctx.buckets:
            ctx.prepare(self.exchange_for(bucket), bucket)
        if self.rank is None and ctx.groups.size > 1:
            ctx.notice(_chosen(self, [matrix_shape(param) for bucket in ctx.buckets for param in bucket.params]))

    def on_ready(self, ctx: Context, bucket: Bucket) -> None:
        """Launch at once."""
        ctx.launch(self.exchange_for(bucket), bucket)

    def on_backward_end(self, ctx: Context) -> None:
        """The optimizer needs the means."""
        ctx.wait()


def _codec(algorithm: PowerSGD) -> str | Codec:
    return ("bf16" if algorithm.rank is None else "identity") if algorithm.codec is None else algorithm.codec


def _low_rank(algorithm: PowerSGD, shapes: Sequence[tuple[int, int]]) -> exchanges.PowerSGD:
    rank, feedback, least = algorithm.rank, algorithm.error_feedback, algorithm.min_compression
    return exchanges.PowerSGD(tuple(shapes), rank, feedback, least, codecs.get(_codec(algorithm)))


def _chosen(algorithm: PowerSGD, shapes: Sequence[tuple[int, int]]) -> str:
    """The remark on ranks that depend on the shapes."""
    exchange, elements = _low_rank(algorithm, shapes), sum(n * m for n, m in shapes)
    ranks = [rank for rank in (exchange.rank_of(n, m) for n, m in shapes) if rank]
    if not ranks:
        return "power_sgd: no parameter is large enough to be compressed; all are averaged exactly"
    ratio = AllReduce().bytes_per_rank(elements, 2) / exchange.bytes_per_rank(elements, 2)
    found = f"rank {min(ranks)}" if min(ranks) == max(ranks) else f"ranks {min(ranks)} to {max(ranks)}"
    return (
        f"power_sgd: {found} by shape, for {len(ranks)} of {len(shapes)} parameters; "
        f"{ratio:.1f} times fewer bytes than gradient_allreduce"
    )


@lru_cache(maxsize=1024)
def _exchange(algorithm: PowerSGD, shapes: tuple[tuple[int, int], ...]) -> Exchange:
    exchange = _low_rank(algorithm, shapes)
    return Hierarchical(exchange) if algorithm.hierarchical else exchange

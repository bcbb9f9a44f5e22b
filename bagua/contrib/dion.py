"""Dion: orthonormalised updates of low rank, from momenta that each rank keeps for itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bagua import codecs
from bagua.algorithms.base import Algorithm, Bucket, Context, Exactness, LostStep
from bagua.algorithms.nodes import fit_hierarchy
from bagua.algorithms.options import check_number
from bagua.algorithms.registry import register
from bagua.codecs import Codec, Identity
from bagua.exchanges import AllReduce, Exchange, Hierarchical, State
from bagua.exchanges.low_rank import TYPICAL, Factored, LowRank, matrix_shape, typical_bytes

__all__ = ["Dion", "Orthonormalised"]

_LEAST = 2.0**-16  # of the longest column of R: what is shorter is mostly rounding, and is not made as long as others


@dataclass(frozen=True)
class Orthonormalised(LowRank):
    """Replaces each matrix G of the bucket by scale P Q^T, an orthonormalised step of low rank; see `Dion`.

    Args:
        shapes: (n, m) of each parameter, in the order of the bucket; (1, n) for what is averaged exactly.
        scales: of the steps, for each parameter.
        rank_fraction: of the shorter side.
        momentum: mu.
        codec: of the factors and of what is averaged exactly: identity or bf16.

    State: `right`, all Q^T; `momentum`, one element for each one of a matrix.
    Bytes: 2 (R-1)/R times 4 bytes for each element of P, R and the rest, sent per rank; 2 bytes with bf16.
    """

    resharding: ClassVar[Mapping[str, str]] = {"right": "equal", "momentum": "mean"}

    shapes: tuple[tuple[int, int], ...]
    scales: tuple[float, ...] = field(repr=False)  # saved states fit any, and any codec
    rank_fraction: float = 0.25
    momentum: float = 0.8
    codec: Codec = field(default_factory=Identity, repr=False)

    def __post_init__(self) -> None:
        share = self.rank_fraction
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"rank_fraction: expected a number with 0 < rank_fraction <= 1, got {share!r}")
        check_number("momentum", self.momentum, 0, 1)
        self._check_codec()
        if len(self.scales) != len(self.shapes):
            raise ValueError(f"scales: expected one for each of {len(self.shapes)} shapes, got {len(self.scales)}")

    @property
    def name(self) -> str:
        """dion, and the part of the rank."""
        return f"dion[{self.rank_fraction:g}{'' if self.codec.lossless else f', {self.codec.name}'}]"

    @property
    def runs_alone(self) -> bool:
        """True: one rank makes the same steps."""
        return True

    @property
    def fed_back(self) -> tuple[str, ...]:
        """The momentum. The right factors of a former step are as good as random ones, which all ranks have alike."""
        return (self.kept,)

    @property
    def kept(self) -> str:
        """The momentum."""
        return "momentum"

    def rank_of(self, n: int, m: int) -> int:
        """Return the rank of the steps of a matrix [n, m]; 0 for a vector, which is averaged exactly."""
        return math.ceil(self.rank_fraction * min(n, m)) if min(n, m) > 1 else 0

    def _keep(self, factored: Sequence[Factored], state: State, finite: bool) -> None:
        """M = B - (1 - mu) P R^T; where a rank's gradient is not finite, M as it was, on all ranks."""
        share = self.momentum - 1
        for _, gradient, matrix, left, right in factored:
            if finite:
                matrix.addmm_(left, right, alpha=share)
                continue
            good = left.isfinite().all()
            matrix.sub_(torch.where(good, 0.0, gradient))
            matrix.addmm_(torch.where(good, left, 0.0), torch.where(good, right, 0.0), alpha=share)
            matrix.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _finish(self, factored: Sequence[Factored], old_Q: Tensor, new_Q: Tensor) -> None:
        """Q is R with columns of length one; the step is scale P Q^T."""
        for place, _, _, left, right in factored:
            length = torch.linalg.vector_norm(right, dim=1, keepdim=True)
            least = (length.amax() * _LEAST).clamp(min=torch.finfo(right.dtype).tiny)
            right.div_(torch.maximum(length, least))
            left.mul_(self.scales[place.number])
        old_Q.copy_(torch.where(new_Q.isfinite(), new_Q, old_Q))


@register
@dataclass(frozen=True)
class Dion(Algorithm):
    """Each rank keeps a momentum of its own, and all make the same orthonormalised step of low rank.

    With the momentum M_r [n, m] of a matrix on rank r, its gradient G_r, and Q [m, k] of the step before:

        B_r = M_r + G_r;   P = orthonormalise(mean over ranks of B_r Q);   R_r = B_r^T P;   R = mean over ranks of R_r
        M_r = B_r - (1 - mu) P R_r^T;   Q = R with columns of length one;   gradient = sqrt(n / m) P Q^T

    P [n, k] and R [m, k] are all that is sent. The mean of the ranks' momenta is that of one rank with the mean
    gradient, for any k: what a step leaves out stays in the momenta.

    This is for the matrices that `torch.optim.SGD` without momentum trains: parameters of which two dimensions or more
    have several elements. The first one is n, the product of the others m. All other parameters are averaged exactly:
    vectors, and those of other optimizers. As with Muon, give embeddings and the output layer to AdamW. The learning
    rate of SGD is about that of `torch.optim.Muon`. Its weight decay is decoupled, since it is added to the step.

    The size of a step does not depend on that of the gradients. So do not clip them. A gradient scaler is refused: it
    would divide the steps by the loss scale. bf16 needs none.

    Which matrices SGD trains is looked up once, at the first backward pass after `bagua.distribute`. The gradients of
    those that `add_param_group` gives it later are averaged exactly, and a warning says so: call `bagua.distribute`
    again. A state that was saved before that call does not fit an SGD that has had them from the start.

    Call backward once per step, and use `bagua.no_sync` for all passes but the last: a second one would add gradients
    to a step, which raises an error. A pass whose gradients are zeroed has gone into the momenta all the same.

    A NaN or an infinity of one rank makes the step of its matrix NaN on all ranks. The momenta are then as before, but
    for zeros where this rank's gradient was not finite.

    Args:
        rank_fraction: k is this part of the shorter side of a matrix, rounded up; 0 < rank_fraction <= 1. With 0.5 a
            square matrix costs as much as its gradient, with 1 twice as much.
        momentum: mu, 0 <= momentum < 1. What a step leaves out stays in M whatever mu is, so a low rank lengthens the
            memory by itself: in trainings of a few hundred steps 0.8 was better than the paper's 0.95.
        codec: "identity" or "bf16", for P, R and what is averaged exactly.
        hierarchical: sum within each node first, factors among the nodes' leaders, which keep the momenta. None
            (default) does so where there are several nodes of which one has several ranks.

    State: the momentum, one fp32 element for each gradient of a matrix (fp64 for fp64), and Q.
    Bytes: 2 (R-1)/R times 4 k (n + m) bytes for a matrix, instead of 4 n m. The figure of `available()` is that of
        1024 x 1024 matrices.
    Source: arXiv:2504.05295 (Dion), algorithm 1 and its form for data parallelism with low-rank communication.
    Differs: mu is 0.8 by default instead of 0.95. QR instead of randomised Cholesky QR. Columns of R that are shorter
        than 2^-16 of the longest one are divided by that length: where a momentum has a lower rank than k, they are
        rounding. A convolution's kernel is one matrix. A transposed weight is factored as it lies in memory.

    Examples:
        >>> import bagua.contrib
        >>> model = torch.nn.Linear(8, 4)
        >>> matrices = [param for param in model.parameters() if param.dim() == 2]
        >>> sgd = torch.optim.SGD(matrices, lr=0.02, weight_decay=0.01)
        >>> adamw = torch.optim.AdamW([param for param in model.parameters() if param.dim() != 2], lr=3e-3)
        >>> model = bagua.distribute(model, [sgd, adamw], bagua.contrib.Dion())
    """

    name: ClassVar[str] = "dion"
    summary: ClassVar[str] = "orthonormalised steps of low rank, from each rank's own momentum"
    exactness: ClassVar[Exactness] = Exactness.LOSSY
    scales_with_loss: ClassVar[bool] = False
    lost_step: ClassVar[LostStep | None] = LostStep.SKIP

    rank_fraction: float = 0.25
    momentum: float = 0.8
    codec: str | Codec = "identity"
    hierarchical: bool | None = None

    def __post_init__(self) -> None:
        _exchange(self, (TYPICAL,), (1.0,))  # refuse bad options now, not in the middle of a run
        if not isinstance(self.hierarchical, bool | None):
            raise ValueError(f"hierarchical: expected True, False or None, got {self.hierarchical!r}")

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Hierarchical by default where there is a hierarchy."""
        return fit_hierarchy(self, nodes, default=True)

    @property
    def hierarchical_groups(self) -> bool:
        """As the option says."""
        return bool(self.hierarchical)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """A typical figure: as if all `n` elements lay in matrices of 1024 x 1024."""
        return typical_bytes(_exchange(self, (TYPICAL,), (1.0,)), n, size)

    def check(self, params: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """SGD must train a matrix, and have no momentum of its own."""
        names: dict[Tensor, str] = {param: name for name, param in params.items()}
        held = [(param, group) for param, group in _trained_by_sgd(optimizers) if param in names]
        for param, group in held:
            if group["momentum"]:
                raise ValueError(
                    f"optimizers: SGD has momentum={group['momentum']:g} for {names[param]!r}, and {self.name!r} keeps "
                    "the momentum itself (option momentum); use torch.optim.SGD with momentum=0"
                )
        if not any(min(matrix_shape(param)) > 1 for param, _ in held):
            found = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
            found = "an SGD that trains none" if held else found
            raise ValueError(
                f"optimizers: {self.name!r} orthonormalises the steps of matrices that torch.optim.SGD trains, got "
                f"{found}; pass [torch.optim.SGD(matrices, lr=0.02), torch.optim.AdamW(others)]"
            )

    def check_sparse(self, params: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Sparse gradients are averaged exactly, so their matrices need another optimizer."""
        held = {param for param, _ in _trained_by_sgd(optimizers)}
        wrong = next((name for name, param in params.items() if param in held), None)
        if wrong is not None:
            raise ValueError(
                f"optimizers: {self.name!r} cannot orthonormalise the sparse gradients of {wrong!r}, which SGD trains; "
                "pass it to another optimizer, for example torch.optim.SparseAdam"
            )

    def setup(self, ctx: Context) -> None:
        """One exchange for each bucket, for its shapes and optimizers."""
        chosen = {param for param, _ in _trained_by_sgd(ctx.optimizers)}
        ctx.keep("num_chosen", list[int])[:] = [len(chosen)]
        exchanges = ctx.keep("exchanges", dict[int, Exchange])
        every: list[tuple[int, int]] = []
        for bucket in ctx.buckets:
            shapes = tuple(matrix_shape(param) if param in chosen else (1, param.numel()) for param in bucket.params)
            made = _exchange(self, shapes, tuple(map(_scale, bucket.params)))
            exchanges[bucket.index] = made
            ctx.prepare(made, bucket)
            every += shapes
        ctx.notice(_told(self, every, ctx.groups.size))

    def on_ready(self, ctx: Context, bucket: Bucket) -> None:
        """Launch at once."""
        ctx.launch(ctx.keep("exchanges", dict[int, Exchange])[bucket.index], bucket)

    def on_backward_end(self, ctx: Context) -> None:
        """The optimizer needs the steps."""
        ctx.wait()
        num = sum(1 for _ in _trained_by_sgd(ctx.optimizers)) - ctx.keep("num_chosen", list[int])[0]
        if num > 0:
            ctx.notice(
                f"dion: SGD got {num} more parameters after distribute(); their gradients are averaged exactly "
                "until you call bagua.distribute() again",
                urgent=True,
            )


def _low_rank(algorithm: Dion, shapes: Sequence[tuple[int, int]], scales: Sequence[float]) -> Orthonormalised:
    codec = codecs.get(algorithm.codec)
    return Orthonormalised(tuple(shapes), tuple(scales), algorithm.rank_fraction, algorithm.momentum, codec)


@lru_cache(maxsize=1024)
def _exchange(algorithm: Dion, shapes: tuple[tuple[int, int], ...], scales: tuple[float, ...]) -> Exchange:
    exchange = _low_rank(algorithm, shapes, scales)
    return Hierarchical(exchange) if algorithm.hierarchical else exchange


def _trained_by_sgd(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """The parameters of every SGD, each with its group."""
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.SGD):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    yield param, group


def _scale(param: Tensor) -> float:
    """sqrt(n / m): n outputs, which are the first dimension however the parameter lies in memory."""
    outputs = next((size for size in param.shape if size > 1), 1)
    return outputs / math.sqrt(max(param.numel(), 1))


def _told(algorithm: Dion, shapes: Sequence[tuple[int, int]], size: int) -> str:
    """The remark on what is orthonormalised."""
    exchange, elements = _low_rank(algorithm, shapes, (1.0,) * len(shapes)), sum(n * m for n, m in shapes)
    ranks = [rank for rank in (exchange.rank_of(n, m) for n, m in shapes) if rank]
    found = f"ranks {min(ranks)} to {max(ranks)}" if ranks else "none"
    text = f"dion: steps of low rank for {len(ranks)} of {len(shapes)} parameters, {found}"
    if size == 1:
        return text
    share = exchange.bytes_per_rank(elements, 2) / AllReduce().bytes_per_rank(elements, 2)
    return f"{text}; {100 * share:.0f} % of the bytes of gradient_allreduce"

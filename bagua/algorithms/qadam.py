"""Quantised momentum of Adam: 8 bits, or 1 bit with error feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from bagua import codecs
from bagua.algorithms.base import Algorithm, Bucket, Context, Exactness, LostStep
from bagua.algorithms.feedback import fit_momentum_feedback
from bagua.algorithms.nodes import fit_hierarchy
from bagua.algorithms.registry import register
from bagua.codecs import Codec
from bagua.exchanges import Exchange, LerpHook, mix
from bagua.optim import QAdam as QAdamOptimizer
from bagua.optim import TwoStage, WarmedUp
from bagua.optim.two_stage import is_zero

__all__ = ["MomentumAverage", "QAdam"]


@dataclass(frozen=True)
class MomentumAverage(Algorithm):
    """Exact mean gradients while the optimizer warms up, then means of quantised momenta.

    The buckets hold gradients. After the warm-up each gradient is turned into the momentum that it would
    give, m_i = b1 m + (1 - b1) g_i, which is exchanged and turned back: see `bagua.optim.TwoStage`. All of that
    runs on the lane, beside the backward pass.
    """

    optimizer_class: ClassVar[type[TwoStage]] = TwoStage
    exactness: ClassVar[Exactness] = Exactness.LOSSY
    lost_step: ClassVar[LostStep | None] = LostStep.SKIP  # the lane only reads momenta

    hierarchical: bool | None = None
    codec: str | Codec = "minmax_uint8"
    error_feedback: bool | None = None

    def __post_init__(self) -> None:
        codecs.get(self.codec)
        _ = self.exchange

    @cached_property
    def exchange(self) -> Exchange:
        """That of the momenta."""
        codec = codecs.get(self.codec)
        feedback = fit_momentum_feedback(self.error_feedback, codec)
        return mix("complete", codec, hierarchical=bool(self.hierarchical), error_feedback=feedback)

    @property
    def effective_options(self) -> Mapping[str, object]:
        """What depends on the codec."""
        return {"error_feedback": fit_momentum_feedback(self.error_feedback, codecs.get(self.codec))}

    @cached_property
    def exact(self) -> Exchange:
        """That of the warm-up."""
        return mix("complete", "identity")

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Hierarchical by default where there is a hierarchy."""
        return fit_hierarchy(self, nodes, default=True)

    def check(self, params: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Exactly one optimizer of the right class holds all parameters."""
        wanted = self.optimizer_class.__name__
        found = [optimizer for optimizer in optimizers if isinstance(optimizer, self.optimizer_class)]
        if len(found) != 1:
            given = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
            raise ValueError(f"optimizers: {self.name!r} needs exactly one bagua.optim.{wanted}, got {given}")
        held = {param for group in found[0].param_groups for param in group["params"]}
        missing = [name for name, param in params.items() if param not in held]
        if missing:
            raise ValueError(
                f"optimizers: {self.name!r} needs all trainable parameters in its {wanted}, "
                f"which lacks {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
            )

    def check_sparse(self, params: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Another optimizer steps with sparse gradients; they are exchanged exactly."""
        held = {
            param
            for optimizer in optimizers
            if isinstance(optimizer, self.optimizer_class)
            for group in optimizer.param_groups
            for param in group["params"]
        }
        wrong = next((name for name, param in params.items() if param in held), None)
        if wrong is not None:
            raise ValueError(
                f"optimizers: {self.name!r} and its {self.optimizer_class.__name__} cannot step with the sparse "
                f"gradients of {wrong!r}; pass it to another optimizer, for example torch.optim.SparseAdam"
            )

    @property
    def uneven(self) -> str:
        """Momenta of a rank that makes no steps would be wrong."""
        return "it averages optimizer momenta, so every rank must make every step"

    def optimizer(self, ctx: Context) -> TwoStage:
        """The one of the right class.

        Raises:
            RuntimeError: it has been deleted since `distribute`.
        """
        for each in ctx.optimizers:
            if isinstance(each, self.optimizer_class):
                return each
        raise RuntimeError(f"{self.name}: the {self.optimizer_class.__name__} given to distribute() no longer exists")

    def setup(self, ctx: Context) -> None:
        """Prepare both exchanges; the optimizer may have got state from rank 0 just now."""
        ctx.prepare(self.exact)
        ctx.prepare(self.exchange)
        self.optimizer(ctx).recount()

    def on_ready(self, ctx: Context, bucket: Bucket) -> None:
        """Launch at once."""
        optimizer = self.optimizer(ctx)
        if not optimizer.compressing or ctx.groups.world.size == 1:
            ctx.launch(self.exact, bucket)
            return
        # In units of the scaled loss: beside gradients that are thousands of times as large, momenta would not count.
        params, scale = bucket.params, None if ctx.loss_scale is None else ctx.loss_scale.to(bucket.flat.device)
        momenta = optimizer.flat_momenta(params, scale)
        ctx.launch(
            self.exchange,
            bucket,
            before=lambda: optimizer.to_momentum(params, bucket.split(bucket.flat), scale),
            after=lambda: optimizer.to_gradient(params, bucket.split(bucket.flat), scale),
            hook=None if momenta is None else _through(momenta),
        )

    def on_backward_end(self, ctx: Context) -> None:
        """The optimizer needs the means; where it is to end its warm-up, all ranks must find so."""
        optimizer = self.optimizer(ctx)
        if isinstance(optimizer, WarmedUp) and optimizer.awaits_verdict:
            self._agree(ctx, optimizer)
        self._look_for_zeros(ctx, optimizer)
        ctx.wait()

    def _look_for_zeros(self, ctx: Context, optimizer: TwoStage) -> None:
        """Tell, once, of parameters that had zeros as gradients until their second moment was fixed."""
        learning = ctx.keep("names of parameters whose second moment learns", lambda: _names(ctx.buckets))
        fixed = optimizer.fixed(learning)
        zeros = is_zero([optimizer.state[param]["exp_avg_sq"] for param in fixed])
        found = [name for name, zero in zip([learning.pop(param) for param in fixed], zeros, strict=True) if zero]
        if found:
            ctx.notice(
                f"{self.name}: {len(found)} parameters had no gradient but zeros until their second moment was fixed, "
                f"so they will not move: {', '.join(sorted(found)[:5])}{' ...' if len(found) > 5 else ''}; give them a "
                "gradient before, or leave them out of the loss until they are trained (.grad is None then)",
                urgent=True,
            )

    def _agree(self, ctx: Context, optimizer: WarmedUp) -> None:
        """Reject the optimizer's last test unless it holds on all ranks."""
        bucket = min(ctx.buckets, key=lambda each: each.flat.numel())
        votes = ctx.scratch("votes", bucket).fill_(float(optimizer.stable))
        ctx.launch(self.exact, bucket, votes)
        ctx.wait()
        unanimous = bool(votes[0] == 1)
        if not unanimous:
            optimizer.reject_test()
        elif optimizer.stable:
            ctx.notice(
                f"{self.name}: the warm-up ends after {optimizer.num_steps} steps: within {optimizer.window} steps the "
                f"norm of the second moment has changed by {100 * (1 - (optimizer.variance_ratio or 0.0)):.1f} % only"
            )


def _names(buckets: Sequence[Bucket]) -> dict[Tensor, str]:
    return {param: name for bucket in buckets for param, name in zip(bucket.params, bucket.names, strict=True)}


def _through(momenta: Sequence[tuple[Tensor, float] | None]) -> LerpHook:
    """`TwoStage.to_momentum` and `to_gradient`, with the same bits: b1 m + (1 - b1) g; (mean - b1 m) / (1 - b1)."""
    return LerpHook([None if found is None else (found[0], found[1], -found[1] / (1 - found[1])) for found in momenta])


@register
@dataclass(frozen=True)
class QAdam(MomentumAverage):
    """Adam whose workers average 8-bit (or 1-bit) momenta. Needs the optimizer `bagua.optim.QAdam`.

    For the optimizer's `warmup_steps` steps every rank steps with the exact mean gradient, as Adam. With "auto" these
    are as many as the second moment needs to become stable; a notice in `bagua.stats` and in the log says so. Then the
    second moment is fixed, and the ranks average quantised momenta:

        m = mean over ranks of Q(b1 m + (1 - b1) g_i),    x -= lr / (1 - b1^k) * m / (sqrt(v) / c + eps)

    The optimizer gets the mean as the gradient (m_new - b1 m) / (1 - b1), so weight decay is added there,
    exactly; clipping of gradients works on the mean, and so does a `bagua.GradScaler`, whose loss scale momenta are
    multiplied with while they are sent. That gradient has the codec's error over 1 - b1: with few bits its norm is
    mostly noise, so clip far above the norm of exact gradients. A parameter that no rank used keeps its momentum, as
    with Adam. The warm-up is over when the optimizer has made its steps, resumed ones included.

    Args:
        hierarchical: full precision within a node, quantised between nodes. None (default) does so where it has
            an effect, that is with several nodes of which one has several ranks; between sites a
            start-up benchmark decides.
        codec: the codec of the momenta: "minmax_uint8" by default, "sign" for 1 bit.
        error_feedback: add the compression error of one step to the next. None (default) does so for codecs with less
            than 8 bits per element and "top_k", which do not converge without: `eden` too, unlike with gradients.

    Bytes: after the warm-up about 2 (R-1)/R bytes per element sent with 8 bits, 2 (R-1)/(8 R) with 1 bit; during
        the warm-up four times what 8 bits cost, an all-reduce in fp32.
    Source: arXiv:2102.02888 (1-bit Adam), algorithm 1; arXiv:2107.01499 section 3 and Bagua 0.9's QAdam.
    Differs: see `bagua.optim.QAdam` for the step; Bagua 0.9 exchanged m itself and lost weight decay.

    Examples:
        >>> optimizer = bagua.optim.QAdam(model.parameters(), warmup_steps=200)
        >>> model = bagua.distribute(model, optimizer, bagua.algorithms.QAdam(codec="sign"))
    """

    name: ClassVar[str] = "qadam"
    summary: ClassVar[str] = "Adam with momenta averaged in 8 bits (or 1) after a warm-up"
    optimizer_class: ClassVar[type[TwoStage]] = QAdamOptimizer

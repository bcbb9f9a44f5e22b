"""Signs by majority vote."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from bagua.algorithms.base import Algorithm, Bucket, Context, Exactness
from bagua.algorithms.registry import register
from bagua.exchanges import Exchange, mix

__all__ = ["SignSGD"]


@register
@dataclass(frozen=True)
class SignSGD(Algorithm):
    """Every rank votes with the signs of its momentum, and all step by the sign that has the majority.

        m_i = momentum * m_i + (1 - momentum) * g_i,      gradient = sign(sum over ranks of sign(m_i))

    Each weight moves by the learning rate, up or down, whatever the size of its gradient. So use plain SGD without
    momentum and a small, falling learning rate such as 1e-4; weight decay is the optimizer's. A single bad rank has one
    vote and no more.

    Ties and zeros count as +1 at even steps and as -1 at odd ones, so a weight whose gradient is zero stays within one
    learning rate of where it was. A NaN or an infinity makes a part of the result NaN on all ranks, and leaves the
    momentum. A gradient scaler is refused: it would divide the steps by the loss scale. bf16 needs none.

    Call backward once per step, and use `bagua.no_sync` for all passes but the last: a second one would add gradients
    to signs, which raises an error. A pass whose gradients are zeroed has gone into the momenta all the same.

    Args:
        momentum: of the gradients before the vote, 0 <= momentum < 1; 0 is signSGD, above it Signum.

    State: the momentum, one element for each gradient.
    Bytes: about 2 (R-1)/R bits per element sent, 1/32 of an all-reduce in fp32.
    Source: arXiv:1802.04434 (signSGD, Signum), algorithm 2; arXiv:1810.05291 (majority vote), algorithm 1.
    Differs: 1 bit has no zero, see above for what it becomes; rank r counts the votes of part r.

    Examples:
        >>> import bagua.contrib
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        >>> model = bagua.distribute(model, optimizer, bagua.contrib.SignSGD(momentum=0.9))
    """

    name: ClassVar[str] = "signsgd"
    summary: ClassVar[str] = "majority vote on the signs of all momenta, 1 bit"
    exactness: ClassVar[Exactness] = Exactness.LOSSY
    scales_with_loss: ClassVar[bool] = False

    momentum: float = 0.9

    def __post_init__(self) -> None:
        if isinstance(self.momentum, bool) or not isinstance(self.momentum, int | float) or not 0 <= self.momentum < 1:
            raise ValueError(f"momentum: expected a number with 0 <= momentum < 1, got {self.momentum!r}")

    @cached_property
    def exchange(self) -> Exchange:
        """The sign of the mean of signs; all votes of a block have one magnitude, so the codec keeps them."""
        return mix("complete", "sign")

    def setup(self, ctx: Context) -> None:
        """Zero momenta."""
        ctx.prepare(self.exchange)
        for bucket in ctx.buckets:
            ctx.tensor("momentum", bucket)

    def on_ready(self, ctx: Context, bucket: Bucket) -> None:
        """Launch at once."""
        x, m = bucket.flat, ctx.tensor("momentum", bucket)
        toward = 1 - 2 * (ctx.step % 2)  # what zeros and ties count as; the codec takes zero for positive

        def vote() -> None:
            m.lerp_(x, 1 - self.momentum)
            x.copy_(_signs(m * toward))
            m.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

        ctx.launch(self.exchange, bucket, before=vote, after=lambda: x.copy_(_signs(x).mul_(toward)))

    def on_backward_end(self, ctx: Context) -> None:
        """The optimizer needs the votes."""
        ctx.wait()


def _signs(x: Tensor) -> Tensor:
    """1 or -1, 1 for both zeros; NaN where `x` is not finite."""
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype).add_(x * 0)

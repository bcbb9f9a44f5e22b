"""Full-precision synchronous data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch

from bagua import codecs
from bagua.algorithms.base import Algorithm, Bucket, Context, LostStep
from bagua.algorithms.feedback import fit_feedback, fit_running_scale, helps_sgd
from bagua.algorithms.nodes import fit_hierarchy
from bagua.algorithms.registry import register
from bagua.codecs import Codec
from bagua.exchanges import Exchange, mix

__all__ = ["GradientAllReduce"]


@register
@dataclass(frozen=True)
class GradientAllReduce(Algorithm):
    """Every rank steps with the mean of all ranks' gradients, as `DistributedDataParallel` does.

    Args:
        hierarchical: sum within each node first, then among the nodes' leaders. None (default) does so where nodes have
            several ranks and the codec cannot be summed, as "int4" and "sign": their ranks would share the node's link.
        average: mean if true, else sum. With sums, call backward once per step, or use `bagua.no_sync` for all
            passes but the last: a sum that is summed again counts twice.
        codec: "identity" (exact), "bf16" or "fp16" (summed in that type), or any lossy codec, which is what
            `ByteGrad` is with "minmax_uint8".
        error_feedback: add the compression error of one step to the next. None (default) does so for codecs with
            less than 8 bits per element, which do not converge without; for unbiased ones, as "eden" is, if
            all optimizers given to `distribute` are `torch.optim.SGD`.
        running_scale: divide each element by the root of its running mean magnitude before it is encoded; 4 bytes of
            state per element. None (default) does so for "eden" without error feedback.

    Bytes: 2 (R-1)/R times the encoded gradients, sent per rank.
    Source: arXiv:2107.01499 (Bagua), section 2.

    Examples:
        >>> algorithm = bagua.algorithms.GradientAllReduce(codec="int4")
        >>> model = bagua.distribute(model, optimizer, algorithm)
    """

    name: ClassVar[str] = "gradient_allreduce"
    summary: ClassVar[str] = "gradients averaged in full precision"
    lost_step: ClassVar[LostStep | None] = LostStep.SKIP

    hierarchical: bool | None = None
    average: bool = True
    codec: str | Codec = "identity"
    error_feedback: bool | None = None
    running_scale: bool | None = None

    def __post_init__(self) -> None:
        _ = self.exchange  # refuse what does not mix now, not in the middle of a run

    @cached_property
    def exchange(self) -> Exchange:
        """The mean of all ranks through the codec, maybe among leaders only."""
        codec = codecs.get(self.codec)
        feedback = fit_feedback(self.error_feedback, codec)
        return mix(
            "complete",
            codec,
            hierarchical=bool(self.hierarchical),
            error_feedback=feedback,
            average=self.average,
            running_scale=fit_running_scale(self.running_scale, codec, feedback),
        )

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Resolve `hierarchical`; it has no effect on one node, or with one rank per node."""
        return fit_hierarchy(self, nodes, default=not codecs.get(self.codec).linear)

    def for_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> Algorithm:
        """Error feedback with SGD and an unbiased codec of few bits, unless one of the two options was given."""
        if self.error_feedback is None and self.running_scale is None and helps_sgd(codecs.get(self.codec), optimizers):
            return replace(self, error_feedback=True)
        return self

    def on_ready(self, ctx: Context, bucket: Bucket) -> None:
        """Launch at once."""
        ctx.launch(self.exchange, bucket)

    def on_backward_end(self, ctx: Context) -> None:
        """The optimizer needs the means."""
        ctx.wait()

"""Full-precision synchronous data parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import nn

from bagua import codecs
from bagua.algorithms.base import Algorithm, Bucket, Context, LostStep
from bagua.algorithms.feedback import fit_feedback, fit_running_scale, helps_sgd
from bagua.algorithms.idle_rows import clear_idle_rows, launch_used_rows, loses_zeros, note_used_rows
from bagua.algorithms.nodes import fit_hierarchy, num_encoding
from bagua.algorithms.noise import (
    check_denoisable,
    denoise_second_moments,
    fit_denoising,
    note_steps,
    set_up_noise,
    share_of_noise,
)
from bagua.algorithms.options import shown
from bagua.algorithms.registry import register
from bagua.codecs import Codec, Eden
from bagua.exchanges import Exchange, mix
from bagua.exchanges.mix import get_gather_codec

__all__ = ["GradientAllReduce"]


@register
@dataclass(frozen=True, repr=False)
class GradientAllReduce(Algorithm):
    """Every rank steps with the mean of all ranks' gradients, as `DistributedDataParallel` does.

    Args:
        hierarchical: sum within each node first, then among the nodes' leaders. None (default) does so where nodes have
            several ranks and the codec cannot be summed, as "int4" and "sign": their ranks would share the node's link;
            and where there are sites (BAGUA_SITE): always if the codec can be summed, else if a start-up benchmark
            finds it faster.
        average: mean if true, else sum. With sums, call backward once per step, or use `bagua.no_sync` for all
            passes but the last: a sum that is summed again counts twice.
        codec: "identity" (exact), "bf16" or "fp16" (summed in that type), or any lossy codec, which is what
            `ByteGrad` is with "minmax_uint8".
        error_feedback: add the compression error of one step to the next. None (default) does so for codecs with
            less than 8 bits per element and "top_k", which do not converge without; for unbiased ones, as "eden" is, if
            all optimizers given to `distribute` are `torch.optim.SGD`.
        running_scale: divide each element by the root of its running mean magnitude before it is encoded; 4 bytes of
            state per element. None (default) does so for "eden" without error feedback.
        denoise_second_moment: take the expected square of the codec's noise out of the second moments of
            `torch.optim.Adam` or `AdamW`; "eden" without error feedback only; 4 bytes of state per element. None
            (default): there, without amsgrad and with weights of at least 32 bits; a notice says so.
        gather_codec: codec of the all-gather phase, which sends the means, with more than two ranks and a codec that is
            not summed. None (default): `codec`. Each rank encodes 1/R of the means, so a codec that takes long, such as
            a trellis, costs little there, and more bits cost half of what they cost in both.

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
    denoise_second_moment: bool | None = None
    gather_codec: str | Codec | None = None

    def __post_init__(self) -> None:
        _ = self.exchange  # refuse what does not mix now, not in the middle of a run
        codec = codecs.get(self.codec)
        if self.denoise_second_moment and (not isinstance(codec, Eden) or self._feedback):
            feedback = " with error feedback" if self._feedback else ""
            raise ValueError(
                "denoise_second_moment: needs codec 'eden' without error feedback, whose noise is known, "
                f"got {codec.name!r}{feedback}"
            )

    def __repr__(self) -> str:
        """As of any dataclass, but without `denoise_second_moment` and `gather_codec` if they are open."""
        return shown(self, ("denoise_second_moment", "gather_codec"))

    @cached_property
    def exchange(self) -> Exchange:
        """The mean of all ranks through the codec, maybe among leaders only."""
        codec, feedback = codecs.get(self.codec), self._feedback
        return mix(
            "complete",
            codec,
            hierarchical=bool(self.hierarchical),
            error_feedback=feedback,
            average=self.average,
            running_scale=fit_running_scale(self.running_scale, codec, feedback),
            gather_codec=self.gather_codec,
        )

    @property
    def _codecs(self) -> tuple[Codec, Codec]:
        """Of the gradients and of their means."""
        codec = codecs.get(self.codec)
        return codec, get_gather_codec(self.gather_codec) or codec

    @property
    def _feedback(self) -> bool:
        return any(fit_feedback(self.error_feedback, codec) for codec in self._codecs)

    @property
    def effective_options(self) -> Mapping[str, object]:
        """What depends on the codec; `denoise_second_moment` depends on the weights too, and a notice says so."""
        codec, feedback = codecs.get(self.codec), self._feedback
        used = {"error_feedback": feedback, "running_scale": fit_running_scale(self.running_scale, codec, feedback)}
        return used if isinstance(codec, Eden) and not feedback else {**used, "denoise_second_moment": False}

    @property
    def needs_steps(self) -> bool:
        """No: the second moments that are corrected at a step are those of an optimizer of torch."""
        kind, own = type(self), GradientAllReduce
        return kind.on_step_begin is not own.on_step_begin or kind.on_step_end is not own.on_step_end

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Resolve `hierarchical`; it has no effect on one node, or with one rank per node."""
        return fit_hierarchy(self, nodes, default=not codecs.get(self.codec).linear)

    def for_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> Algorithm:
        """Error feedback with SGD and an unbiased codec of few bits, unless one of the two options was given."""
        given = (self.error_feedback, self.running_scale, self.denoise_second_moment or None)
        if given == (None, None, None) and any(helps_sgd(codec, optimizers) for codec in self._codecs):
            return replace(self, error_feedback=True)
        return self

    def check(self, params: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """There must be second moments where noise is to be taken out of them."""
        if self.denoise_second_moment:
            check_denoisable(params, optimizers)

    def setup(self, ctx: Context) -> None:
        """Prepare the exchange, and what the noise in second moments is estimated from."""
        ctx.prepare(self.exchange)
        if self.gather_codec is not None and num_encoding(ctx, bool(self.hierarchical)) == 2:
            ctx.notice(f"{self.name}: two ranks encode no means, so gather_codec has no effect")
        if self._denoises(ctx):
            set_up_noise(ctx)

    def on_ready(self, ctx: Context, bucket: Bucket) -> None:
        """Launch at once."""
        clears = self._clears_idle_rows(ctx)
        if clears:
            note_used_rows(ctx, bucket)
        ctx.launch(self.exchange, bucket)
        if clears and bucket.index == len(ctx.buckets) - 1:
            launch_used_rows(ctx, ctx.buckets)

    def on_backward_end(self, ctx: Context) -> None:
        """The optimizer needs the means."""
        ctx.wait()
        if self._clears_idle_rows(ctx):
            clear_idle_rows(ctx, ctx.buckets, [bucket.flat for bucket in ctx.buckets])

    def on_step_begin(self, ctx: Context) -> None:
        """Only parameters that make a step are corrected."""
        if self._denoises(ctx):
            note_steps(ctx)

    def on_step_end(self, ctx: Context) -> None:
        """Correct what the optimizers have added to their second moments."""
        codec, gather_codec = self._codecs
        if self._denoises(ctx) and isinstance(codec, Eden):
            scaled = fit_running_scale(self.running_scale, codec, feedback=False)
            share = share_of_noise(codec, num_encoding(ctx, bool(self.hierarchical)), gather_codec)
            denoise_second_moments(ctx, share, scaled)

    @cached_property
    def _loses_zeros(self) -> bool:
        """What error feedback has put into a row is made up for later."""
        return not self._feedback and loses_zeros(*self._codecs)

    def _clears_idle_rows(self, ctx: Context) -> bool:
        return self._loses_zeros and num_encoding(ctx, bool(self.hierarchical)) > 1

    def _denoises(self, ctx: Context) -> bool:
        codec, hierarchical = codecs.get(self.codec), bool(self.hierarchical)
        return fit_denoising(self.denoise_second_moment, ctx, codec, self._feedback, hierarchical, self.name)

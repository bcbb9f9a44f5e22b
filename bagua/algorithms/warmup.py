"""Warm-up: one algorithm for the first steps, then another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from bagua.algorithms.base import Algorithm, Context, LostStep, Payload
from bagua.algorithms.registry import get

__all__ = ["Warmup"]


@dataclass(frozen=True)
class Warmup(Algorithm):
    """Run `first` for `steps` training steps, then `then`.

    It only schedules the switch; each of the two runs as if it were used alone. Steps count from the start of training,
    those of a `Warmup` within it too. With `fault_tolerant` the first one must be an algorithm that skips a lost step;
    the second one any that has a rule for it.

    Args:
        steps: training steps with `first`; 0 starts with `then`.
        first: an instance, or a registered name with default options.
        then: likewise.

    Examples:
        >>> algorithm = bagua.algorithms.Warmup(steps=100, then="bytegrad")
        >>> model = bagua.distribute(model, optimizer, algorithm)
    """

    name: ClassVar[str] = "warmup"

    steps: int
    first: str | Algorithm = field(default="gradient_allreduce")
    then: str | Algorithm = field(default="bytegrad")

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 0:
            raise ValueError(f"Warmup: steps must be an integer >= 0, got {self.steps!r}")
        object.__setattr__(self, "first", get(self.first))
        object.__setattr__(self, "then", get(self.then))
        # A loss at the switch finds ranks on either side of it. One before it takes over the state of one beyond: it
        # loses nothing by that only while replicas are equal.
        first, then = self.parts
        object.__setattr__(self, "lost_step", then.lost_step if first.lost_step is LostStep.SKIP else None)

    @property
    def parts(self) -> tuple[Algorithm, Algorithm]:
        """`first` and `then`."""
        return get(self.first), get(self.then)

    def at_step(self, step: int) -> Algorithm:
        """`first` or `then`."""
        return self.parts[0 if step < self.steps else 1].at_step(step)

    @property
    def payload(self) -> Payload:
        """The payload of what runs at the start."""
        return self.parts[0 if self.steps else 1].payload

    @property
    def payloads(self) -> set[Payload]:
        """Those of both."""
        return {payload for part in self.parts for payload in part.payloads}

    def replicas_differ(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Those of what runs at the start."""
        return self.parts[0 if self.steps else 1].replicas_differ(optimizers)

    def check_sparse(
        self, params: Mapping[str, torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Both must agree."""
        for part in self.parts:
            part.check_sparse(params, optimizers)

    @property
    def hierarchical_groups(self) -> bool:
        """Whether either of the two needs them."""
        return any(part.hierarchical_groups for part in self.parts)

    def bytes_per_rank(self, n: int, size: int) -> float:
        """Those of `then`."""
        return self.parts[1].bytes_per_rank(n, size)

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Fit both."""
        (first, remark), (then, other) = (part.for_nodes(nodes) for part in self.parts)
        return replace(self, first=first, then=then), "; ".join(filter(None, (remark, other)))

    def for_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> Algorithm:
        """Fit both."""
        first, then = (part.for_optimizers(optimizers) for part in self.parts)
        return replace(self, first=first, then=then)

    def check(self, params: Mapping[str, torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Both must agree."""
        for part in self.parts:
            part.check(params, optimizers)

    def setup(self, ctx: Context) -> None:
        """Schedule the switch and start with `first`."""
        first, then = self.parts
        if self.steps > ctx.step:
            ctx.at(self.steps, then)
            ctx.bind(first)
        else:
            ctx.bind(then)

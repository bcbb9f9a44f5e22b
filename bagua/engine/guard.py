"""Measure the compression error against the exact mean every few steps, and fall back if it is too large."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bagua.algorithms.base import Algorithm
from bagua.algorithms.registry import get
from bagua.comm.collectives import all_reduce_
from bagua.comm.groups import Groups
from bagua.exchanges import AllReduce, Exchange, State

__all__ = ["Guard", "Probe", "Quality"]


@dataclass(frozen=True)
class Guard:
    """Measure the compression error periodically, and fall back to another algorithm if it exceeds a limit.

    Every `every` steps an exact all-reduce of the same values runs next to each lossy exchange. All ranks see the same
    numbers and take the same decision without further communication.

    Args:
        every: steps between two measurements; each one adds an all-reduce in full precision.
        min_cosine: lower limit of the cosine between the decoded and the exact mean. A working codec with error
            feedback stays far above the default even with one bit.
        max_relative_error: upper limit of the norm of (decoded - exact) divided by the norm of exact; None: no limit.
            With error feedback it may exceed 1, because it includes corrections of earlier steps.
        max_residual: upper limit of the norm of the error feedback residual divided by the norm of the values; None: no
            limit.
        fallback: the algorithm to switch to when a limit is exceeded, or None to report only.

    Raises:
        ValueError: an option is out of range, or the fallback is unknown.

    Examples:
        >>> model = bagua.distribute(model, optimizer, "bytegrad", guard=bagua.Guard(every=50, min_cosine=0.9))
        >>> bagua.stats(model).quality  # None until the first measurement
    """

    every: int = 100
    min_cosine: float = 0.05
    max_relative_error: float | None = None
    max_residual: float | None = None
    fallback: str | Algorithm | None = "gradient_allreduce"

    def fallback_on(self, nodes: tuple[tuple[int, ...], ...]) -> Algorithm | None:
        """The fallback, fitted to the job's nodes."""
        return None if self.fallback is None else get(self.fallback).for_nodes(nodes)[0]

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"Guard: every must be an integer >= 1, got {self.every!r}")
        if not -1.0 <= self.min_cosine <= 1.0:
            raise ValueError(f"Guard: min_cosine must be between -1 and 1, got {self.min_cosine!r}")
        for name in ("max_relative_error", "max_residual"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ValueError(f"Guard: {name} must be positive or None, got {limit!r}")
        if self.fallback is not None:
            get(self.fallback)


@dataclass(frozen=True)
class Quality:
    """Compression error that a `Guard` measured over all buckets of one step.

    Attributes:
        step: step of the measurement.
        relative_error: norm of (decoded mean - exact mean) divided by the norm of the exact mean; infinite if only the
            exact mean is finite.
        cosine: cosine between the decoded and the exact mean; 0 if only the exact mean is finite.
        residual: norm of all ranks' error feedback residuals divided by the norm of their values; 0 without feedback.
        consensus: root of the mean over ranks of the squared distance of the weights from their mean, divided by the
            norm of that mean; 0 if all ranks hold the same weights.
    """

    step: int
    relative_error: float = 0.0
    cosine: float = 1.0
    residual: float = 0.0
    consensus: float = 0.0


@dataclass
class Probe:
    """Measures the compression error. `run` is called on lanes, the rest by the training thread after it waited."""

    guard: Guard
    last: Quality | None = None
    also_at: int | None = None  # a step that is measured beside those of the guard
    _sums: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # by bucket and part
    _consensus: float | None = None  # of the step that is being measured; None: weights are not compared
    _kept: float = 0.0  # square of the norm of all ranks' residuals that an algorithm keeps

    def due(self, step: int) -> bool:
        """Whether `step` is measured."""
        return step % self.guard.every == 0 or step == self.also_at

    def run(
        self, exchange: Exchange, x_N: Tensor, state: State, groups: Groups, step: int, key: tuple[int, int]
    ) -> None:
        """Run `exchange` and, on a copy, the exact one; keep, under `key`, what is needed to compare."""
        exact_N, own = x_N.clone(), x_N.double().square().sum()
        exchange.run(x_N, state, groups, step)
        AllReduce(average=getattr(exchange, "average", True)).run(exact_N, {}, groups, step)
        a, b = x_N.double(), exact_N.double()
        residual = torch.zeros_like(own)
        for name in exchange.fed_back:
            if name in state:
                residual += state[name].double().square().sum()
        # Summed over the ranks, so that all of them hold the same bits and decide alike.
        sums = torch.stack([(a - b).square().sum(), a @ a, b @ b, a @ b, residual, own])
        self._sums[key] = all_reduce_(groups.world, sums)

    def measured(self, step: int) -> str:
        """Close the measurement of `step`; returns why it is too bad, or an empty string."""
        consensus, kept, self._consensus, self._kept = self._consensus, self._kept, None, 0.0
        if consensus is not None:
            self.last = Quality(step, consensus=consensus)
        if not self._sums:
            return ""
        # In one order on all ranks, whichever lane was done first.
        sums = torch.stack([self._sums[key] for key in sorted(self._sums)])
        error, aa, bb, ab, residual, own = sums.sum(0).tolist()
        self._sums.clear()
        if not math.isfinite(bb):
            return ""  # an overflow without the codec
        errors, apart = _ratio(residual + kept, own), consensus or 0.0
        if not math.isfinite(error):  # and no scaler has skipped the step: it would not have come here
            self.last = Quality(step, math.inf, 0.0, errors, apart)
            return "the decoded mean is infinite or NaN and the exact one is not; the step was made with it"
        cosine = ab / math.sqrt(aa * bb) if aa > 0 and bb > 0 else float(aa == bb)
        self.last = Quality(step, _ratio(error, bb), cosine, errors, apart)
        return self._verdict(self.last)

    def _verdict(self, quality: Quality) -> str:
        guard = self.guard
        if quality.cosine < guard.min_cosine:
            return f"cosine {quality.cosine:.3f} to the exact mean is below {guard.min_cosine}"
        if guard.max_relative_error is not None and quality.relative_error > guard.max_relative_error:
            return f"relative error {quality.relative_error:.3f} is above {guard.max_relative_error}"
        if guard.max_residual is not None and quality.residual > guard.max_residual:
            return f"residual {quality.residual:.3f} is above {guard.max_residual}"
        return ""

    def compare_weights(self, flats: Sequence[Tensor], kept: Sequence[Tensor], groups: Groups) -> None:
        """Measure how far the ranks' weights are apart, and what an algorithm keeps of errors; runs on a lane.

        Args:
            flats: the weights.
            kept: residuals, the tensors that `Algorithm.fed_back` names.
        """
        group = groups.world
        sums = torch.zeros(3, dtype=torch.float64, device=flats[0].device)
        for flat in flats:
            mean = all_reduce_(group, flat.clone().mul_(1.0 / group.size))
            sums[:2] += torch.stack([(flat - mean).double().square().sum(), mean.double().square().sum()])
        for residual in kept:
            sums[2] += residual.double().square().sum()
        apart, norm, self._kept = all_reduce_(group, sums).tolist()
        self._consensus = _ratio(apart, norm)


def _ratio(squared: float, over: float) -> float:
    return math.sqrt(squared / over) if over > 0 else (0.0 if squared == 0 else math.inf)

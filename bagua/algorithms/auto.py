"""Auto: the place of an algorithm that is chosen during the first steps."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from bagua.algorithms.base import Algorithm, Context
from bagua.algorithms.gradient_allreduce import GradientAllReduce
from bagua.exchanges import Exchange
from bagua.registry import Registry

__all__ = ["ALLOWED", "Auto", "get_or_auto"]

ALLOWED = ("exact", "lossy", "periodic", "decentralized", "asynchronous")


@dataclass(frozen=True)
class Auto(Algorithm):
    """Measure links and steps, then train with the fastest setting that learns well enough.

    It is not in the registry, as it exchanges nothing itself: it begins with `GradientAllReduce`, and the engine
    switches between steps to what is chosen. `bagua.explain` shows the choice.

    Args:
        allow: the class that the choice may belong to. Each class contains those before it: "exact" (gradients in full
            precision), "lossy" (gradients compressed; replicas stay equal), "periodic" (local steps), "decentralized"
            (weights averaged with peers), "asynchronous" (weights averaged in the background).
        max_loss_gap: how much worse than `DistributedDataParallel` a setting may learn, as a fraction of the loss. A
            setting whose loss was not measured with the optimizer's family is chosen only if this is infinite.
            None: 0.02 for "exact" and "lossy", 0.04 for the others.
        adapt: choose again when the rate of a link has halved or doubled for good, and take the next finer or coarser
            number of bits, or rank, when exchanges change less.

    Raises:
        ValueError: names the argument that is wrong.

    Examples:
        >>> algorithm = bagua.algorithms.Auto(allow="exact")
        >>> algorithm.limit("lossy")
        0.02
    """

    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "measures, and chooses among the others"

    allow: str = "lossy"
    max_loss_gap: float | None = None
    adapt: bool = True
    nodes: tuple[tuple[int, ...], ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        if self.allow not in ALLOWED:
            raise ValueError(f"allow: expected one of {', '.join(ALLOWED)}, got {self.allow!r}")
        gap = self.max_loss_gap
        if gap is not None and (math.isnan(gap) or gap < 0):
            raise ValueError(f"max_loss_gap: expected a fraction >= 0 or None, got {gap!r}")

    def limit(self, kind: str) -> float:
        """The largest loss gap of a setting of class `kind`, as a fraction."""
        if self.max_loss_gap is not None:
            return float(self.max_loss_gap)
        return 0.02 if kind in ("exact", "lossy") else 0.04

    @cached_property
    def first(self) -> Algorithm:
        """What runs until the choice is made."""
        return GradientAllReduce().for_nodes(self.nodes)[0]

    @cached_property
    def exchange(self) -> Exchange:
        """That of the first steps."""
        assert isinstance(self.first, GradientAllReduce)
        return self.first.exchange

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Keep the nodes for the candidates."""
        fitted = copy.copy(self)
        fitted.__dict__.pop("first", None)
        fitted.__dict__.pop("exchange", None)
        object.__setattr__(fitted, "nodes", nodes)
        return fitted, ""

    @property
    def hierarchical_groups(self) -> bool:
        """Whether a candidate may need them."""
        return len(self.nodes) > 1 and any(len(node) > 1 for node in self.nodes)

    def setup(self, ctx: Context) -> None:
        """Begin in full precision."""
        ctx.bind(self.first)


_auto: Registry[Algorithm] = Registry("algorithm", Algorithm)
_auto.register(Auto)


def get_or_auto(registry: Registry[Algorithm], name_or_instance: str | Algorithm, options: dict[str, Any]) -> Algorithm:
    """As `registry.get`; "auto" is a name too.

    Raises:
        TypeError, ValueError: as `Registry.get`.
    """
    chosen = _auto if isinstance(name_or_instance, str) and name_or_instance == Auto.name else registry
    if isinstance(name_or_instance, str) and name_or_instance not in chosen:
        raise ValueError(registry.unknown(name_or_instance, Auto.name))
    return chosen.get(name_or_instance, **options)

"""Whether an algorithm can be chosen by measuring, and what chooses it."""

from __future__ import annotations

from importlib import import_module

from bagua.algorithms.auto import Auto
from bagua.algorithms.base import Algorithm
from bagua.comm.team import Team
from bagua.engine.choosing import Chooser
from bagua.engine.startup.request import Request

__all__ = ["chooser_of", "why_no_choice"]

# It lies above the engine, with the simulation by which it predicts, and is imported when first asked for.
_HOME = "bagua.auto.session"


def why_no_choice(request: Request, team: Team) -> ValueError | None:
    """Why an algorithm cannot be chosen here; None if it can, or was named."""
    if not isinstance(request.algorithm, Auto):
        return None
    instead = 'name an algorithm, such as "gradient_allreduce"'
    if team.backend not in ("gloo", "nccl"):
        return ValueError(f'algorithm: "auto" measures links, and simulated ranks have none; {instead}')
    if not request.optimizers:
        return ValueError(f'optimizers: "auto" measures steps, which end with theirs; pass them, or {instead}')
    if request.tune is not None:
        return ValueError(
            'autotune: not with algorithm "auto" yet: each changes the steps that the other times; name an algorithm'
        )
    return None


def chooser_of(algorithm: Algorithm) -> Chooser | None:
    """What chooses for `Auto`; None for other algorithms."""
    return import_module(_HOME).ChoiceSession(algorithm) if isinstance(algorithm, Auto) else None

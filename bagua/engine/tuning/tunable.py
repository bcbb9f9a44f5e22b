"""Protocol: what a tuning session needs from an engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from bagua.algorithms.base import Algorithm
from bagua.autotune import Settings
from bagua.comm.groups import Groups
from bagua.comm.team import Team
from bagua.engine.reducer.bucket import Bucket
from bagua.engine.reducer.bucketing import Entry, Plan
from bagua.exchanges import Exchange

__all__ = ["Tunable"]


class Tunable(Protocol):
    """An engine, seen by its tuning session. All ranks make the same calls in the same order."""

    @property
    def num_opened(self) -> int:
        """Lanes ever opened beside the first one; part of the names of process groups."""
        ...

    @num_opened.setter
    def num_opened(self, value: int) -> None: ...

    @property
    def team(self) -> Team:
        """The ranks that train together."""
        ...

    @property
    def groups(self) -> Groups:
        """Process groups of the first lane."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of all parameters."""
        ...

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in force."""
        ...

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers whose steps end a training step."""
        ...

    @property
    def step(self) -> int:
        """Training steps completed so far."""
        ...

    @property
    def hand_overs(self) -> Sequence[int]:
        """Steps after which another algorithm takes over."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """All buckets, in the order of exchange."""
        ...

    @property
    def plan(self) -> Plan | None:
        """The assignment of parameters to buckets, None before there is one."""
        ...

    def plan_entries(self, order: Sequence[str] | None = None) -> Sequence[Entry]:
        """Return name, size and dtype of each parameter in the order of exchange."""
        ...

    def plan_with(self, bucket_bytes: int) -> Plan:
        """Return the plan for buckets of `bucket_bytes`."""
        ...

    @property
    def starts_early(self) -> bool:
        """Whether the first bucket is small."""
        ...

    @property
    def element_bytes(self) -> Mapping[str, int]:
        """Bytes of an element of each trainable parameter."""
        ...

    @property
    def exchanges(self) -> Collection[Exchange]:
        """The exchanges that the algorithm has prepared."""
        ...

    @property
    def keeps_state(self) -> bool:
        """Whether exchanges or the algorithm keep tensors between steps."""
        ...

    @property
    def tunes_hierarchy(self) -> bool:
        """Whether reducing within each node first may be switched on and off."""
        ...

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        ...

    def check_settings(self, settings: Settings) -> None:
        """Check whether this rank can adopt `settings`.

        Raises:
            RuntimeError, MemoryError: it cannot.
        """
        ...

    def adopt_settings(self, settings: Settings) -> None:
        """Exchange with `settings` from now on. Collective, between steps."""
        ...

    @property
    def num_open_lanes(self) -> int:
        """Lanes that are open."""
        ...

    @property
    def num_busy_lanes(self) -> int:
        """Lanes that can be busy at once."""
        ...

    def close_lanes(self, keep: int) -> None:
        """Close all lanes but the first `keep`, between steps."""
        ...

    def line_up(self) -> None:
        """Barrier: return at about the same time on all ranks. Collective."""
        ...

    def notice(self, text: str, urgent: bool = False) -> None:
        """Log `text` and keep it in `bagua.stats(module).notices`."""
        ...

"""Protocols between an engine and what chooses its algorithm, and the engine's side of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from bagua.algorithms.auto import Auto
from bagua.algorithms.base import Algorithm
from bagua.comm.team import Team
from bagua.engine.guard import Guard, Probe, Quality
from bagua.engine.parts import ExchangeParts, TrainingParts
from bagua.engine.startup.sharded import check_sharded
from bagua.engine.startup.shared_memory import check_memory
from bagua.engine.stats import StepStats, Tally

__all__ = ["Choosable", "Chooser", "EngineChoices", "Switch", "probe_of"]

_NEVER = 1 << 62  # steps between two measurements of a guard that nobody asked for


class Choosable(Protocol):
    """An engine, seen by its chooser. All ranks make the same calls in the same order, between steps."""

    @property
    def team(self) -> Team:
        """The ranks that train together."""
        ...

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by node."""
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
    def step(self) -> int:
        """Training steps completed so far."""
        ...

    @property
    def ready(self) -> bool:
        """Whether there are buckets, and no other hand-over is due."""
        ...

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers whose steps end a training step."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the trained parameters, in the order of the forward pass as far as it is known."""
        ...

    @property
    def last(self) -> StepStats:
        """What the last step communicated."""
        ...

    @property
    def quality(self) -> Quality | None:
        """The last measurement of the compression error."""
        ...

    @property
    def joining(self) -> bool:
        """Whether ranks train on different numbers of batches now."""
        ...

    def why_not(self, algorithm: Algorithm) -> str:
        """Why this rank cannot train with `algorithm`; empty if it can."""
        ...

    def hand_over(self, algorithm: Algorithm) -> None:
        """Train with `algorithm` from the next step on. Collective.

        Raises:
            ValueError: it cannot be set up on these buckets; on all ranks alike.
        """
        ...

    def measure_quality_at(self, step: int) -> None:
        """Compare the exchanges of that step with exact ones."""
        ...

    def begin_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Begin to sum a few numbers over the ranks beside training; returns what waits for the sums. Collective."""
        ...

    def line_up(self) -> None:
        """Barrier: return at about the same time on all ranks. Collective."""
        ...

    def notice(self, text: str) -> None:
        """Log `text` and keep it in `bagua.stats(module).notices`."""
        ...


class Chooser(Protocol):
    """Chooses the algorithm of one engine. The engine holds it; it holds no engine."""

    @property
    def explanation(self) -> Any:
        """What `bagua.explain` returns."""
        ...

    def step_begins(self) -> None:
        """Before the first forward pass of a step."""
        ...

    def backward_begins(self) -> None:
        """A synchronised backward pass begins."""
        ...

    def optimizer_begins(self, plain_scaler: bool) -> None:
        """Before the first optimizer's step.

        Args:
            plain_scaler: a scaler of torch's makes it, whose ranks may decide differently about local gradients.
        """
        ...

    def step_ended(self, engine: Choosable) -> None:
        """After a step, when no exchange is in flight."""
        ...

    @property
    def settled(self) -> bool:
        """Whether nothing is measured any more."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The choice as plain data."""
        ...

    def holds(self, state: Mapping[str, Any]) -> bool:
        """Whether a choice was made in `state`, on nodes like those of now."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> Algorithm:
        """Go on with the choice in `state` if it holds, else choose anew, from full precision on.

        Args:
            state: from `state_dict`.
            optimizers: that the algorithm is fitted to.

        Returns:
            The algorithm to go on with.

        Raises:
            ValueError: the state is not one of a choice.
        """
        ...


class Switch(Protocol):
    """The part of an engine that hands over to another algorithm."""

    def hand_over(self, algorithm: Algorithm) -> None:
        """Make replicas equal and bind `algorithm`."""
        ...

    @property
    def is_joining(self) -> bool:
        """Whether ranks train on different numbers of batches now."""
        ...


class EngineChoices:
    """Implements `Choosable` for the parts of an engine."""

    def __init__(
        self, training: TrainingParts, exchanges: ExchangeParts, tally: Tally, probe: Probe | None, switch: Switch
    ) -> None:
        self.team = training.team
        self._state, self._inventory, self._optimizers = training.state, training.inventory, training.optimizers
        self._pool, self._dispatcher = exchanges.pool, exchanges.dispatcher
        self._switch, self._tally, self._probe = switch, tally, probe

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by node."""
        return self._pool.groups.nodes

    @property
    def device(self) -> torch.device:
        """The device of all parameters."""
        return self._inventory.device

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in force."""
        return self._state.algorithm

    @property
    def step(self) -> int:
        """Training steps completed so far."""
        return self._state.step

    @property
    def ready(self) -> bool:
        """Whether there are buckets, and no other hand-over is due."""
        return bool(self._state.buckets) and not self._state.schedule

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that are followed."""
        return self._optimizers.alive

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the trained parameters, the last gradient first."""
        params = self._inventory.trainable
        order = reversed(self._state.order) if self._state.order is not None else params
        return {name: tuple(params[name].shape) for name in order}

    @property
    def last(self) -> StepStats:
        """What the last step communicated."""
        return self._tally.snapshot()[0]

    @property
    def quality(self) -> Quality | None:
        """The last measurement of the compression error."""
        return self._probe.last if self._probe is not None else None

    @property
    def joining(self) -> bool:
        """Whether ranks train on different numbers of batches now."""
        return self._switch.is_joining

    def why_not(self, algorithm: Algorithm) -> str:
        """Why this rank cannot train with `algorithm`; empty if it can."""
        if self._inventory.sparse and algorithm.payload is not Auto.payload_kind:
            return "the module has sparse gradients"
        try:
            algorithm.check(self._inventory.trainable, self.optimizers)
            algorithm.check_sparse(self._inventory.sparse, self.optimizers)
            check_sharded(self.optimizers, algorithm)
            check_memory(self._inventory, algorithm)
        except ValueError as error:
            return str(error)
        return ""

    def hand_over(self, algorithm: Algorithm) -> None:
        """Train with `algorithm` from the next step on. Collective."""
        self._switch.hand_over(algorithm)

    def measure_quality_at(self, step: int) -> None:
        """Compare the exchanges of that step with exact ones."""
        if self._probe is not None:
            self._probe.also_at = step

    def begin_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Begin to sum a few numbers over the ranks beside training."""
        return self._dispatcher.begin_sum(values)

    def line_up(self) -> None:
        """Barrier."""
        self._dispatcher.line_up()

    def notice(self, text: str) -> None:
        """Log `text` and keep it."""
        self._state.notice(text)


def probe_of(guard: Guard | None, chooses: bool) -> Probe | None:
    """What measures the compression error, for a guard or for a chooser."""
    if guard is None and not chooses:
        return None
    return Probe(guard if guard is not None else Guard(every=_NEVER, min_cosine=-1.0, fallback=None))

"""The implementation of `bagua.Context`, the algorithm's view of the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, TypeVar, cast

import torch
from torch import Tensor

from bagua.algorithms.base import Algorithm, QuorumLane
from bagua.algorithms.base import Bucket as BucketView
from bagua.algorithms.base import Lane as LaneView
from bagua.algorithms.base import Ticket as TicketView
from bagua.comm.groups import Groups
from bagua.engine.algorithm_memory import AlgorithmMemory
from bagua.engine.failures import Failures
from bagua.engine.followed_optimizers import FollowedOptimizers
from bagua.engine.lanes.dispatcher import Dispatcher
from bagua.engine.lanes.lane import BackgroundLane, Lane
from bagua.engine.lanes.pool import LanePool
from bagua.engine.reducer.bucket import Bucket
from bagua.engine.training_state import TrainingState
from bagua.errors import CommunicationError
from bagua.exchanges import Exchange

__all__ = ["Binder", "EngineContext"]

_T = TypeVar("_T")


class Binder(Protocol):
    """Protocol of the part that switches to another algorithm."""

    def bind(self, algorithm: Algorithm) -> None:
        """Switch to `algorithm` now."""
        ...


class EngineContext:
    """Delegates each call to the part of the engine that implements it; `bagua.Context` documents them.

    Attributes:
        launch, launch_early: those of `Dispatcher`.
    """

    def __init__(
        self,
        state: TrainingState,
        optimizers: FollowedOptimizers,
        pool: LanePool,
        dispatcher: Dispatcher,
        memory: AlgorithmMemory,
        failures: Failures,
    ) -> None:
        self._state, self._optimizers = state, optimizers
        self._pool, self._dispatcher, self._memory = pool, dispatcher, memory
        self._failures = failures
        self.launch, self.launch_early = dispatcher.launch, dispatcher.launch_early
        self._binder: weakref.ref[Binder] | None = None

    def use_binder(self, binder: Binder) -> None:
        """Switch algorithms through `binder`, which holds this context."""
        self._binder = weakref.ref(binder)

    @property
    def step(self) -> int:
        """Training steps completed so far."""
        return self._state.step

    @property
    def groups(self) -> Groups:
        """Rank, size and nodes."""
        return self._pool.groups

    @property
    def buckets(self) -> Sequence[Bucket]:
        """All buckets, in the order of exchange."""
        return self._state.buckets

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that are followed."""
        return self._optimizers.alive

    @property
    def launched(self) -> bool:
        """Whether something was launched since the last `wait`."""
        return self._dispatcher.launched

    @property
    def paused(self) -> bool:
        """Whether the user has paused background communication."""
        return self._state.paused

    def prepare(self, exchange: Exchange, bucket: BucketView | None = None) -> None:
        """Make the state of `exchange` for one bucket or all."""
        self._dispatcher.prepare(exchange, bucket)

    def launch_sum(
        self, x_P: Tensor, *, before: Callable[[], object] | None = None, lane: LaneView | None = None
    ) -> TicketView:
        """Queue a small sum over all ranks."""
        return self._dispatcher.launch_sum(x_P, before=before, lane=lane)

    def wait(self, ticket: TicketView | None = None) -> None:
        """Wait for one launch, or for all on the default lanes."""
        self._dispatcher.wait(ticket)

    @property
    def loss_scale(self) -> Tensor | None:
        """What a gradient scaler multiplies the loss with."""
        return self._state.loss_scale

    @property
    def fault_tolerant(self) -> bool:
        """Whether training goes on after a lost rank."""
        return self._failures.recovery is not None

    def give_up(self, why: str) -> NoReturn:
        """Say that background exchanges have ended."""
        raise CommunicationError(why)

    @property
    def repeats(self) -> bool:
        """Whether the end of a step may be repeated."""
        return self._failures.recovery is not None

    def commit(self) -> None:
        """Wait until all that was launched counts."""
        self._dispatcher.wait()
        self._failures.commit_exchange()

    def new_lane(self) -> Lane:
        """Open another lane."""
        flats = [bucket.flat for bucket in self._state.buckets]
        return self._pool.open_extra([*flats, *self._memory.all_tensors()])

    def background_lane(self) -> BackgroundLane:
        """Open a lane with a gate."""
        return self._pool.open_background(type(self._state.algorithm).__name__)

    def quorum_lane(self, quorum: int, grace: float) -> QuorumLane:
        """Open a lane with a gate for rounds of a quorum."""
        lane = self._pool.open_background(type(self._state.algorithm).__name__, (quorum, grace))
        return cast(QuorumLane, lane)

    def tensor(self, name: str, bucket: BucketView, like: Tensor | None = None) -> Tensor:
        """Return a named tensor of a bucket that is saved."""
        return self._memory.tensor(name, bucket, like)

    def scratch(self, name: str, bucket: BucketView) -> Tensor:
        """Return a named tensor of a bucket that is not saved."""
        return self._memory.scratch(name, bucket)

    def keep(self, name: str, make: Callable[[], _T]) -> _T:
        """Return an object of the algorithm."""
        return self._memory.keep(name, make)

    def report(self, name: str, value: float) -> None:
        """Add a value to a series of `bagua.stats`."""
        self._memory.report(name, value)

    def notice(self, text: str, urgent: bool = False) -> None:
        """Log `text` and keep it in `bagua.stats`."""
        self._state.notice(text, urgent)

    def at(self, step: int, algorithm: Algorithm) -> None:
        """Schedule a switch."""
        self._state.schedule[step] = algorithm

    def bind(self, algorithm: Algorithm) -> None:
        """Switch now."""
        binder = self._binder() if self._binder is not None else None
        assert binder is not None, "the engine is gone"
        binder.bind(algorithm)

"""The research surface: an algorithm says what is exchanged, how, and at which moment of a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from bagua.comm.groups import Groups
from bagua.exchanges import Exchange, Passage

__all__ = ["Algorithm", "BackgroundLane", "Bucket", "Context", "Exactness", "Gate", "Lane", "Payload", "Ticket"]


class Payload(Enum):
    """What the buckets are views of."""

    GRAD = "grad"
    PARAM = "param"


class Exactness(Enum):
    """What an algorithm keeps of plain synchronous SGD."""

    EXACT = "exact"
    LOSSY = "lossy synchronous"
    DECENTRALIZED = "decentralized"
    ASYNCHRONOUS = "asynchronous"


class Bucket(Protocol):
    """A run of parameters whose payload lies in one flat tensor, exchanged at once."""

    @property
    def index(self) -> int:
        """Position in the order of exchange."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in the order in which they lie in `flat`."""
        ...

    @property
    def params(self) -> tuple[torch.nn.Parameter, ...]:
        """The parameters, in the same order."""
        ...

    @property
    def flat(self) -> Tensor:
        """The payload: [N], one dtype; each parameter's gradient (or the parameter itself) is a view of it."""
        ...

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """Return each parameter's part of `flat`, a tensor like the payload, in the parameter's shape."""
        ...


class Ticket(Protocol):
    """One launched exchange."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not; on a GPU: whether its result may be used without waiting."""
        ...

    @property
    def error(self) -> BaseException | None:
        """What went wrong, once it is done."""
        ...

    def wait(self) -> None:
        """Block until it is done. `Context.wait` also raises and keeps count; prefer it."""
        ...


class Lane(Protocol):
    """Where exchanges run, first in first out."""

    @property
    def groups(self) -> Groups:
        """The lane's own groups."""
        ...


class Gate(Protocol):
    """Where the jobs of a background lane wait for the other ranks'."""

    @property
    def over(self) -> bool:
        """Whether nobody will ever pass again, since a rank has left."""
        ...

    @property
    def remark(self) -> str:
        """Why, or which rank is late; "" if there is nothing to say."""
        ...

    @property
    def urgent(self) -> bool:
        """Whether the remark tells of trouble."""
        ...

    def enter(self, give_up: Callable[[], bool]) -> bool:
        """Wait, in `before` of a launch, for all ranks to enter as often as this one has; true if they all did.

        False if a rank gave up or has left, and then on all ranks.

        Args:
            give_up: asked now and then; true calls this meeting off, unless all have entered already.
        """
        ...


class BackgroundLane(Lane, Protocol):
    """A lane that may wait for other ranks as long as it has to, while training goes on."""

    @property
    def gate(self) -> Gate:
        """Jobs hold it and not the lane, so that the lane of a dropped module can end."""
        ...

    def abandon(self) -> None:
        """Give the lane up after an error; other ranks no longer wait for this one."""
        ...


_T = TypeVar("_T")


class Context(Protocol):
    """All that an algorithm may touch. Made by the engine; the same calls must be made in the same order everywhere."""

    @property
    def step(self) -> int:
        """Training steps completed so far."""
        ...

    @property
    def groups(self) -> Groups:
        """Rank, size and nodes; its collectives belong to the lane and are not for the training thread."""
        ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """All buckets, in the order of exchange."""
        ...

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers given to `distribute`."""
        ...

    def prepare(self, exchange: Exchange, bucket: Bucket | None = None) -> None:
        """Make the state of `exchange` for `bucket` (default: every bucket), now, from the bucket's payload.

        Call it in `setup` for each exchange you launch: at that moment all ranks hold the same values.
        """
        ...

    def launch(
        self,
        exchange: Exchange,
        bucket: Bucket,
        x: Tensor | None = None,
        *,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
        passage: Passage | None = None,
        step: int | None = None,
        lane: Lane | None = None,
    ) -> Ticket:
        """Queue `exchange` behind all launched before; returns at once.

        Args:
            exchange: prepared in `setup`.
            bucket: whose state is used.
            x: what is exchanged in place, like `bucket.flat`; the bucket's payload by default.
            before: runs on the lane just before the exchange, in order, also with a single rank; if it returns
                False, neither the exchange nor `after` runs (see to it that all ranks agree).
            after: likewise just after it.
            passage: does the same as `before` and `after`, range by range, and takes their place where the exchange can
                use it and `x` is not given, which saves passes over memory; needs both of them beside it.
            step: what the exchange takes for the step, if not `ctx.step`.
            lane: one from `new_lane`; `wait` does not wait for it, ask the ticket.

        Returns:
            A ticket that tells whether it is done.

        Raises:
            ValueError: `passage` without `before` or `after`.
            CommunicationError: an earlier exchange has failed.
        """
        ...

    def new_lane(self) -> Lane:
        """Open a lane with process groups of its own, for exchanges that must not queue behind the others.

        Collective: call it in `setup`. It is closed with the algorithm.
        """
        ...

    def background_lane(self) -> BackgroundLane:
        """Open a lane for exchanges that nobody waits for. As `new_lane`, but always a thread, on a GPU too.

        When the lane ends, on whichever rank first, its gate opens no more.
        """
        ...

    @property
    def launched(self) -> bool:
        """Whether something was launched since the last `wait`."""
        ...

    def tensor(self, name: str, bucket: Bucket, like: Tensor | None = None) -> Tensor:
        """Return the tensor `name` of `bucket`: made on first use, a copy of `like` (any shape and type) or zeros [N].

        It lives as long as the algorithm is bound, and is part of `bagua.state_dict`. Make those that are not like
        the payload in `setup`, so that `bagua.load_state_dict` finds their place.
        """
        ...

    def scratch(self, name: str, bucket: Bucket) -> Tensor:
        """Return a tensor like `bucket.flat` of undefined content that is kept, but not saved."""
        ...

    def keep(self, name: str, make: Callable[[], _T]) -> _T:
        """Return the object `name`, made on first use. It lives as long as the algorithm is bound; not saved."""
        ...

    @property
    def paused(self) -> bool:
        """Whether the user wants nothing to begin in the background; see `bagua.abort`."""
        ...

    def report(self, name: str, value: float) -> None:
        """Add a value to the series `name` in `bagua.stats(module).extra`: count, last, mean and maximum."""
        ...

    def notice(self, text: str, urgent: bool = False) -> None:
        """Tell the user, in the log and in `bagua.stats(module).notices`; a text is told once.

        Args:
            text: what to know.
            urgent: a warning, else an information.
        """
        ...

    def at(self, step: int, algorithm: Algorithm) -> None:
        """Hand over to `algorithm` once `step` training steps are completed. Call it in `setup`."""
        ...

    def bind(self, algorithm: Algorithm) -> None:
        """Hand over to `algorithm` now: new buckets if its payload differs, then its `setup`.

        Between steps only: in `setup` or `on_step_end`.
        """
        ...

    def wait(self, ticket: Ticket | None = None) -> None:
        """Return when the launch behind `ticket` is done, or all that was launched on the default lane.

        Raises:
            CommunicationError: what went wrong in the lane.
        """
        ...


@dataclass(frozen=True)
class Algorithm:
    """Six moments of a training step. Override those you need; a specification, so keep tensors in the context.

    Attributes:
        name: the registry name.
        summary: one line for `available()`.
        exactness: what it keeps of plain synchronous SGD.
        payload_kind: what the buckets are views of.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    exactness: ClassVar[Exactness] = Exactness.EXACT
    payload_kind: ClassVar[Payload] = Payload.GRAD

    @property
    def payload(self) -> Payload:
        """What the buckets are views of."""
        return self.payload_kind

    @property
    def payloads(self) -> set[Payload]:
        """The payload, and those of algorithms that it hands over to."""
        return {self.payload}

    @property
    def uneven(self) -> str:
        """Why ranks cannot train on different numbers of batches (`bagua.join`), or ""."""
        return ""

    @cached_property
    def exchange(self) -> Exchange:
        """The exchange of the default `setup` and `bytes_per_rank`; for algorithms that have just one."""
        raise TypeError(f"{type(self).__name__} must define `exchange`, or override `setup` and `bytes_per_rank`")

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Fit options that were left open (None) to the job's nodes; returns the algorithm and a remark or "".

        A remark tells the user of an option that cannot act here; it is logged once and kept in `bagua.stats`.
        """
        return self, ""

    def check(self, params: Mapping[str, torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse what the algorithm cannot train, in `distribute`, before anything has changed.

        Args:
            params: the trainable parameters by name.
            optimizers: those given to `distribute`.

        Raises:
            ValueError: names what is missing.
        """

    def check_sparse(
        self, params: Mapping[str, torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """As `check`, of parameters whose gradients are sparse, and exchanged beside the buckets.

        Raises:
            ValueError: names what does not work.
        """

    def shares_gradients(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether optimizers find the same gradients on all ranks, and so decide alike to skip a step."""
        return self.payload is Payload.GRAD

    @property
    def hierarchical_groups(self) -> bool:
        """Whether lanes need groups within and between nodes."""
        return self.exchange.hierarchical

    def bytes_per_rank(self, n: int, size: int) -> float:
        """Bytes that a rank sends per step for `n` fp32 elements among `size` ranks."""
        return self.exchange.bytes_per_rank(n, size)

    def setup(self, ctx: Context) -> None:
        """Once the buckets exist: in `distribute` for PARAM, at the end of the first synchronised backward for GRAD."""
        ctx.prepare(self.exchange)

    def on_forward(self, ctx: Context) -> None:
        """Before the first forward pass of a step, in training mode."""

    def on_ready(self, ctx: Context, bucket: Bucket) -> None:
        """All gradients of `bucket` are in place; called in the same order of buckets on all ranks."""

    def on_backward_end(self, ctx: Context) -> None:
        """The backward pass is over and every bucket has been ready."""

    def on_step_begin(self, ctx: Context) -> None:
        """Before the first optimizer's step: backward passes, one or several, are over."""

    def on_step_end(self, ctx: Context) -> None:
        """Every optimizer has made its step."""

    def on_pause(self, ctx: Context) -> None:
        """Leave nothing under way in the background: before `abort`, `average`, a hand-over or the end."""

    def on_load(self, ctx: Context) -> None:
        """The user puts back saved weights: forget what is under way."""

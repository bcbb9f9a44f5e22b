"""Base class of algorithms and the interface to the engine: what is exchanged, how, and when in a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from bagua.algorithms.kinds import Exactness, LostStep, Payload
from bagua.algorithms.views import BackgroundLane, Ballot, Bucket, Gate, Lane, QuorumGate, QuorumLane, Ticket
from bagua.comm.groups import Groups
from bagua.exchanges import ElementwiseHook, Exchange

__all__ = [
    "Algorithm",
    "BackgroundLane",
    "Ballot",
    "Bucket",
    "Context",
    "Exactness",
    "Gate",
    "Lane",
    "LostStep",
    "Payload",
    "QuorumGate",
    "QuorumLane",
    "Ticket",
]


_T = TypeVar("_T")


class Context(Protocol):
    """Interface of the engine to an algorithm. All ranks must make the same calls in the same order."""

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
        """Create the state of `exchange` for `bucket` (default: every bucket) from the bucket's payload.

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
        hook: ElementwiseHook | None = None,
        step: int | None = None,
        lane: Lane | None = None,
        passage: ElementwiseHook | None = None,
    ) -> Ticket:
        """Queue `exchange` behind all launched before; returns at once.

        Args:
            exchange: prepared in `setup`.
            bucket: whose state is used.
            x: what is exchanged in place, like `bucket.flat`; the bucket's payload by default.
            before: runs on the lane just before the exchange, in order, also with a single rank; if it returns
                False, neither the exchange nor `after` runs (see to it that all ranks agree).
            after: likewise just after it.
            hook: equivalent of `before` and `after` that works range by range. It replaces them where the exchange
                supports it and `x` is not given, which saves passes over memory. Pass `before` and `after` too.
            step: the step number passed to the exchange; default `ctx.step`.
            lane: one from `new_lane`; `wait` does not wait for it, query the ticket.
            passage: deprecated name of `hook`.

        Returns:
            A ticket to wait for.

        Raises:
            ValueError: `hook` without `before` or `after`; both `hook` and `passage`.
            CommunicationError: an earlier exchange has failed.
        """
        ...

    def new_lane(self) -> Lane:
        """Open a lane with process groups of its own, for exchanges that must not queue behind the others.

        Collective: call it in `setup`. It is closed with the algorithm.
        """
        ...

    def background_lane(self) -> BackgroundLane:
        """Open a lane for background exchanges. As `new_lane`, but always a thread, on a GPU too.

        When the lane ends on any rank, its gate stays closed.
        """
        ...

    def quorum_lane(self, quorum: int, grace: float) -> QuorumLane:
        """Open a background lane whose rounds close without the ranks that are late.

        Args:
            quorum: ranks that must contribute to a round.
            grace: how long a round stays open once they are ready, relative to the time until then.
        """
        ...

    @property
    def launched(self) -> bool:
        """Whether something was launched since the last `wait`."""
        ...

    def tensor(self, name: str, bucket: Bucket, like: Tensor | None = None) -> Tensor:
        """Return the tensor `name` of `bucket`: made on first use, a copy of `like` (any shape and type) or zeros [N].

        It lives as long as the algorithm is bound, and is part of `bagua.state_dict`. Make those that are not like
        the payload in `setup`, so that `bagua.load_state_dict` finds their place. Where the payload is gradients, what
        a pass has written for a parameter that no rank used in it is undone, in tensors with N elements.
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
        """Whether the user has paused background communication; see `bagua.pause`."""
        ...

    def report(self, name: str, value: float) -> None:
        """Add a value to the series `name` in `bagua.stats(module).extra`: count, last, mean and maximum."""
        ...

    def notice(self, text: str, urgent: bool = False) -> None:
        """Report a remark in the log and in `bagua.stats(module).notices`; each text once.

        Args:
            text: the remark.
            urgent: a warning, else an information.
        """
        ...

    def at(self, step: int, algorithm: Algorithm) -> None:
        """Switch to `algorithm` once `step` training steps are completed. Call it in `setup`."""
        ...

    def bind(self, algorithm: Algorithm) -> None:
        """Switch to `algorithm` now: new buckets if its payload differs, then its `setup`.

        Between steps only: in `setup` or `on_step_end`.
        """
        ...

    def launch_early(self, exchange: Exchange, buckets: Sequence[Bucket]) -> None:
        """Queue `exchange` for each of `buckets` on the default lane, and return when these may be used and changed.

        With an exchange of two phases, such as `bagua.exchanges.DifferenceGossip`, that is before what the peers send
        has come: call `wait` before the next launch.

        Raises:
            CommunicationError: an exchange failed before that.
        """
        ...

    def launch_sum(
        self, x_P: Tensor, *, before: Callable[[], object] | None = None, lane: Lane | None = None
    ) -> Ticket:
        """Queue the exact sum of a small tensor over all ranks, in place, beside what was launched before; see `wait`.

        Shapes: x_P: [P] contiguous, of a floating-point type, on the device of the buckets. Keep it until it is done.

        Args:
            x_P: see above.
            before, lane: as of `launch`.
        """
        ...

    def wait(self, ticket: Ticket | None = None) -> None:
        """Return when the launch behind `ticket` is done, or all that was launched on the default lane.

        Raises:
            CommunicationError: an exchange failed in the lane.
        """
        ...

    @property
    def fault_tolerant(self) -> bool:
        """Whether training goes on in other groups after a `CommunicationError`."""
        return False

    def give_up(self, why: str) -> NoReturn:
        """Say that background exchanges have ended. With `fault_tolerant` other groups are opened then.

        Raises:
            CommunicationError: always.
        """
        ...

    @property
    def loss_scale(self) -> Tensor | None:
        """What gradients are multiplied with until the optimizer's step, as known from the last one; None: nothing.

        A tensor that the gradient scaler changes.
        """
        return None

    @property
    def repeats(self) -> bool:
        """Whether `on_step_end` may be called again for the same step: change nothing before `commit` then."""
        return False

    def commit(self) -> None:
        """Wait for all that was launched, until it counts on all ranks; then apply it. In `on_step_end` only.

        With `fault_tolerant` the hosts agree on that; otherwise it is `wait`.

        Raises:
            CommunicationError: an exchange failed, or a rank was lost. With `LostStep.REPEAT` the engine then calls
                `on_step_end` again, with the ranks that are left.
        """
        self.wait()


@dataclass(frozen=True)
class Algorithm:
    """Base class of algorithms. Override the methods that the engine calls during a step: `setup`, `on_forward`, ...

    Keep tensors in the context, not in the algorithm.

    Attributes:
        name: the registry name.
        summary: one line for `available()`.
        exactness: which guarantees of synchronous SGD it keeps.
        payload_kind: whether buckets hold gradients or weights.
        lost_step: with `fault_tolerant`, what becomes of a step in which a rank is lost; None: there is no rule, so
            training cannot go on.
        kept: with `fault_tolerant`, names of tensors (`Context.tensor`) that a rank keeps when the members change, and
            that a newcomer gets. All others are made anew by `setup`.
        fed_back: names of tensors (`Context.tensor`) with errors of this rank that are added to what it sends later. A
            `Guard` measures them where replicas may differ, as it does those of exchanges (`Exchange.fed_back`).
        scales_with_loss: what the optimizers get is as many times larger as the loss. False, of a sign for example, has
            gradient scalers refused: they would divide the steps by the loss scale. A second synchronised backward pass
            before a step is refused too, unless gradients were zeroed: it would add to signs.
        not_compared: names of options that change no number, as time limits. A saved state can be loaded with other
            values of them.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    exactness: ClassVar[Exactness] = Exactness.EXACT
    payload_kind: ClassVar[Payload] = Payload.GRAD
    lost_step: ClassVar[LostStep | None] = None
    kept: ClassVar[tuple[str, ...]] = ()
    fed_back: ClassVar[tuple[str, ...]] = ()
    scales_with_loss: ClassVar[bool] = True
    not_compared: ClassVar[tuple[str, ...]] = ()

    @property
    def payload(self) -> Payload:
        """Which tensors the buckets hold."""
        return self.payload_kind

    @property
    def payloads(self) -> set[Payload]:
        """The payload, and those of algorithms that it switches to."""
        return {self.payload}

    def at_step(self, step: int) -> Algorithm:
        """The algorithm in force once `step` steps are completed: another one, if this one only schedules."""
        return self

    @property
    def uneven(self) -> str:
        """Why ranks cannot train on different numbers of batches (`bagua.join`), or ""."""
        return ""

    @property
    def effective_options(self) -> Mapping[str, object]:
        """Options that were left open (None) and follow from the others, with the values that are used.

        `bagua.stats(module).algorithm` shows them.
        """
        return {}

    @cached_property
    def exchange(self) -> Exchange:
        """The exchange of the default `setup` and `bytes_per_rank`; for algorithms that have just one."""
        raise TypeError(f"{type(self).__name__} must define `exchange`, or override `setup` and `bytes_per_rank`")

    @property
    def keeps_weights(self) -> bool:
        """Whether what is kept of weights must be alike on all ranks, so that they agree on these before `on_start`.

        It is assumed of algorithms that have an `on_start`. The state of exchanges is made anew then, too. Asynchronous
        ones wait for nobody, so their `on_start` is called without that.
        """
        return type(self).on_start is not Algorithm.on_start

    @property
    def needs_steps(self) -> bool:
        """Whether replicas go wrong if steps are made by something else than an optimizer of torch."""
        kind = type(self)
        acts = kind.on_step_begin is not Algorithm.on_step_begin or kind.on_step_end is not Algorithm.on_step_end
        return acts or self.payload is Payload.PARAM

    def for_nodes(self, nodes: tuple[tuple[int, ...], ...]) -> tuple[Algorithm, str]:
        """Fit options that were left open (None) to the job's nodes; returns the algorithm and a remark or "".

        A remark names an option without effect on this job; it is logged once and kept in `bagua.stats`.
        """
        return self, ""

    def for_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> Algorithm:
        """Fit options that were left open (None) to the optimizers given to `distribute`; returns the algorithm."""
        return self

    def check(self, params: Mapping[str, torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse models and optimizers that the algorithm cannot train; called by `distribute` before any change.

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

    def replicas_differ(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether the ranks may hold different weights now, between two steps.

        The same on all ranks. `bagua.average_parameters` and a switch, scheduled or by `distribute`, then
        average the weights; a switch also averages the optimizers' state. Override it if you exchange gradients in some
        steps only.
        """
        return self.payload is Payload.PARAM

    def shares_gradients(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether optimizers see the same gradients on all ranks, and so skip the same steps."""
        return self.payload is Payload.GRAD

    def averages_gradients(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether the next step averages gradients or momenta in its backward pass. The same on all ranks."""
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

    def on_start(self, ctx: Context) -> None:
        """Before the first step, PARAM only: weights and moments may have been loaded since `setup`.

        What is kept of them is made anew here. At the end of the first synchronised backward pass, or before
        `on_forward` if there is one. Not with `fault_tolerant`, nor if `keeps_weights` and the ranks' weights differ.
        """

    def on_forward(self, ctx: Context) -> None:
        """Before the first forward pass of a step in training mode with gradients enabled."""

    def on_ready(self, ctx: Context, bucket: Bucket) -> None:
        """All gradients of `bucket` are in place; called in the same order of buckets on all ranks."""

    def on_backward_end(self, ctx: Context) -> None:
        """The backward pass is over and every bucket has been ready."""

    def on_step_begin(self, ctx: Context) -> None:
        """Before the first optimizer's step: backward passes, one or several, are over."""

    def on_step_end(self, ctx: Context) -> None:
        """Every optimizer has made its step."""

    def on_pause(self, ctx: Context) -> None:
        """Complete or cancel background exchanges: before `pause`, `average_parameters`, a switch or the end."""

    def saving(self, ctx: Context) -> AbstractContextManager[object]:
        """Entered while tensors are copied for `bagua.state_dict`: nothing in the background may change them."""
        return nullcontext()

    def on_load(self, ctx: Context) -> None:
        """Saved weights were loaded: drop what is in flight."""

    def on_members_changed(self, ctx: Context) -> None:
        """With `fault_tolerant`, after `setup` with other ranks: tensors in `kept` are back, nothing is in flight."""

    def on_lost_step(self, ctx: Context) -> None:
        """With `fault_tolerant`: the optimizers have stepped without gradients, and the step does not count."""

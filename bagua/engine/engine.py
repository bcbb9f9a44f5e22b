"""The engine of one distributed module: follows its training steps and tells the algorithm their moments.

One synchronised backward pass:
  hook of each gradient -> its bucket counts down -> full buckets are announced in the agreed order (`on_ready`)
  end of the pass       -> buckets still waiting are flushed -> `on_backward_end`
The first pass only records the order; see `docs/design/0001-core.md`.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagua.algorithms.base import Algorithm, Payload
from bagua.algorithms.base import Bucket as BucketView
from bagua.comm.groups import Groups
from bagua.comm.team import Team, decode, encode
from bagua.engine.bucket import Bucket
from bagua.engine.lane import Lane, StreamLane, Ticket
from bagua.engine.params import Inventory
from bagua.engine.plan import Entry, Plan, make_plan
from bagua.engine.stats import Stats, Tally
from bagua.engine.usage import UsageBoard
from bagua.errors import CommunicationError
from bagua.exchanges import Exchange, State

__all__ = ["Engine"]

_log = logging.getLogger("bagua")
_ROLL_CALL_S = 3.0  # how long a failed rank waits for the others to fail too, before it names those that did not


class Engine:
    """Runs one algorithm for one module. Implements `bagua.Context`.

    Holds no reference to the module: the module's entry in a weak dictionary holds the engine.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        inventory: Inventory,
        optimizers: Sequence[torch.optim.Optimizer],
        team: Team,
        lane: Lane,
        bucket_bytes: int,
        key: str,
        order: Sequence[str] | None = None,
        notices: Sequence[str] = (),
    ) -> None:
        self.algorithm = algorithm
        self.inventory = inventory
        self.team = team
        self.lane = lane
        self.sync = True  # False within no_sync
        self.notices = tuple(notices)
        self.bucket_bytes = bucket_bytes
        self.buckets: list[Bucket] = []
        self.step = 0
        self._key = key
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._names = list(inventory.trainable)
        self._params = list(inventory.trainable.values())
        self._tally = Tally(lane.groups.meters, team.size)
        self._usage = UsageBoard(team.store, f"usage/{key}", team.rank, team.size, len(self._params))
        self._states: dict[tuple[Exchange, int], State] = {}
        self._tickets: list[Ticket] = []
        self._stepped: set[int] = set()
        self._failed = False
        # Of one backward pass:
        self._open = False
        self._callback_queued = False
        self._pass_index = 0
        self._arrived = bytearray(len(self._params))
        self._used = bytearray(len(self._params))  # since the last synchronised pass, no_sync passes included
        self._num_arrived = 0
        self._order: list[int] = []  # arrivals of the first pass
        self._waiting: list[int] = []  # per bucket: gradients still to come
        self._next = 0  # first bucket not yet announced
        # By parameter, once there is a plan:
        self._views: list[Tensor] = []
        self._bucket_of: list[int] = []
        if order is not None or algorithm.payload is Payload.PARAM:
            self.adopt_plan(self._plan(order or reversed(self._names)))

    # -- Context -----------------------------------------------------------------------------------------------

    @property
    def groups(self) -> Groups:
        """Rank, size and nodes."""
        return self.lane.groups

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that still exist."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def prepare(self, exchange: Exchange) -> None:
        """Make the state of `exchange` for every bucket."""
        for bucket in self.buckets:
            self._states[exchange, bucket.index] = exchange.init(bucket.flat, self.groups)

    def launch(self, exchange: Exchange, bucket: BucketView, x: Tensor | None = None) -> None:
        """Queue `exchange` on the lane."""
        try:
            state = self._states[exchange, bucket.index]
        except KeyError:
            raise RuntimeError(
                f"{type(self.algorithm).__name__}: launch of {exchange.name} without ctx.prepare() in setup()"
            ) from None
        tensor = bucket.flat if x is None else x
        groups, step = self.groups, self.step

        def run() -> None:
            exchange.run(tensor, state, groups, step)

        own = self.buckets[bucket.index]
        self._tally.launched(tensor.numel() * tensor.element_size())
        label = f"{exchange.name} step {step} {own.describe()}"
        self._tickets.append(self.lane.submit(run, label))

    def wait(self) -> None:
        """Wait for everything launched; raise the first error of the lane."""
        if not self._tickets:
            return
        started = time.perf_counter()
        for ticket in self._tickets:
            self.lane.wait(ticket)
        exposed = time.perf_counter() - started
        tickets, self._tickets = self._tickets, []
        self._tally.waited(tickets, exposed)
        for ticket in tickets:
            if ticket.error is not None:
                self._fail(ticket)

    # -- moments of a step, called by the hooks ----------------------------------------------------------------

    def forward_begins(self) -> None:
        """Before a forward pass in training mode."""
        if self._open and torch._C._current_graph_task_id() == -1:
            self._end_pass()  # the last backward pass was broken off by an exception
        if self._stepped:
            self._end_step()
        for name, param in self.inventory.frozen.items():
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was frozen at bagua.distribute() and now requires a gradient; "
                    "call bagua.distribute() again after unfreezing, on all ranks"
                )
        if self.buckets or self.algorithm.payload is Payload.PARAM:
            self.algorithm.on_forward(self)

    def gradient_ready(self, index: int) -> None:
        """autograd has accumulated the gradient of parameter `index`."""
        self._used[index] = 1
        if not self.sync:
            return
        if not self._callback_queued:
            self._begin_pass()
        if self._arrived[index]:
            self._arrived_twice(index)
            return
        self._arrived[index] = 1
        self._num_arrived += 1
        if not self.buckets:
            self._order.append(index)
            return
        param = self._params[index]
        if self.algorithm.payload is Payload.GRAD and param.grad is not self._views[index]:
            self._realias(index, param)
        number = self._bucket_of[index]
        self._waiting[number] -= 1
        if self._waiting[number] == 0 and number == self._next:
            self._announce_ready()

    def optimizer_steps(self) -> None:
        """Before a step of an optimizer."""
        if self._open:
            self._end_pass()

    def optimizer_stepped(self, number: int) -> None:
        """After a step of optimizer `number`."""
        self._stepped.add(number)
        if len(self._stepped) == len(self.optimizers):
            self._end_step()

    def _end_step(self) -> None:
        self._stepped.clear()
        if self.buckets:
            self.algorithm.on_step_end(self)
        self.step += 1
        self._tally.step_ended()

    # -- a backward pass ---------------------------------------------------------------------------------------

    def _begin_pass(self) -> None:
        self._callback_queued = True
        ref = weakref.ref(self)

        def backward_ended() -> None:
            engine = ref()
            if engine is not None:
                engine._backward_ended()

        torch.autograd.Variable._execution_engine.queue_callback(backward_ended)  # pyright: ignore
        if self._open:
            return
        self._check_alive()
        self._open = True
        self._arrived = bytearray(len(self._params))
        self._num_arrived = 0
        self._order = []
        self._waiting = [len(bucket.params) for bucket in self.buckets]
        self._next = 0

    def _backward_ended(self) -> None:
        self._callback_queued = False
        if not self._open:
            return
        # A checkpointed segment runs a backward pass within the backward pass, which ends here too. Gradients
        # of other segments are still to come, unless all are there.
        nested = torch._C._current_autograd_node() is not None
        if not nested or self._num_arrived == len(self._params):
            self._end_pass()

    def _end_pass(self) -> None:
        self._open = self._callback_queued = False
        self._check_alive()
        if not self.buckets:
            self._learn_order()
        missing = self._fill_missing() if self._num_arrived < len(self._params) else {}
        if self._next < len(self.buckets):
            self._waiting = [0] * len(self.buckets)
            self._announce_ready()
        self.algorithm.on_backward_end(self)
        if missing:
            self._settle_missing(missing)
        self._used = bytearray(len(self._params))
        self._pass_index += 1
        if not self._optimizers:
            self._end_step()

    def _announce_ready(self) -> None:
        last = len(self.buckets) - 1
        while self._next <= last and self._waiting[self._next] == 0:
            if self._next == last:
                self._usage.publish(self._pass_index, _bits(self._used))
            bucket = self.buckets[self._next]
            self._next += 1
            self.algorithm.on_ready(self, bucket)

    @torch.no_grad()
    def _realias(self, index: int, param: nn.Parameter) -> None:
        """Make `param.grad` the view of its bucket again after `zero_grad(set_to_none=True)`."""
        grad, view = param.grad, self._views[index]
        if grad is None:
            return
        if grad.layout is not torch.strided:
            raise ValueError(f"parameter {self._names[index]!r} got a {grad.layout} gradient; only dense ones work")
        view.copy_(grad)
        param.grad = view

    def _arrived_twice(self, index: int) -> None:
        if self.buckets and self._bucket_of[index] < self._next:
            raise RuntimeError(
                f"parameter {self._names[index]!r} got another gradient in the same backward pass after its "
                "bucket had left: a reentrant checkpoint uses it in several segments; use use_reentrant=False"
            )

    # -- parameters without a gradient -------------------------------------------------------------------------

    @torch.no_grad()
    def _fill_missing(self) -> dict[int, Tensor | None]:
        """Put into the buckets what gradients did not come in this pass.

        Returns, for each parameter that was not used at all since the last synchronised pass, its gradient as it
        was (None if none).
        """
        if self.algorithm.payload is not Payload.GRAD:
            return {}
        kept: dict[int, Tensor | None] = {}
        for index, arrived in enumerate(self._arrived):
            if arrived:
                continue
            param, view = self._params[index], self._views[index]
            grad = param.grad
            if not self._used[index]:
                kept[index] = grad.clone() if grad is view else grad
            if grad is None:
                view.zero_()
            elif grad is not view:
                view.copy_(grad)
            if self._used[index]:
                param.grad = view
        return kept

    @torch.no_grad()
    def _settle_missing(self, kept: dict[int, Tensor | None]) -> None:
        """Give parameters that other ranks used the mean, and those that nobody used what they had."""
        self.wait()
        if isinstance(self.lane, StreamLane):  # the exchange must be over, not only enqueued, before asking
            torch.cuda.current_stream(self.inventory.device).synchronize()
        union = self._usage.union(self._pass_index, _bits(self._used))
        for index, grad in kept.items():
            param, view = self._params[index], self._views[index]
            if union >> index & 1:
                param.grad = view
            elif param.grad is view and grad is not None:
                view.copy_(grad)

    # -- plan --------------------------------------------------------------------------------------------------

    def _learn_order(self) -> None:
        """End of the first pass: agree on rank 0's order, make the buckets, move the gradients there."""
        seen = set(self._order)
        order = self._order + [index for index in reversed(range(len(self._params))) if index not in seen]
        names = [self._names[index] for index in order]
        agreed = decode(self.team.tell("agreement on the order of gradients", encode(names) if not self.team.rank else None))
        self.adopt_plan(self._plan(agreed))
        for index, arrived in enumerate(self._arrived):
            if arrived and self.algorithm.payload is Payload.GRAD:
                self._realias(index, self._params[index])

    def _plan(self, order: Sequence[str] | Any) -> Plan:
        params = self.inventory.trainable
        entries = [
            Entry(name, params[name].numel() * params[name].element_size(), str(params[name].dtype)) for name in order
        ]
        return make_plan(entries, self.bucket_bytes)

    def adopt_plan(self, plan: Plan) -> None:
        """Make buckets after `plan` and set the algorithm up on them."""
        self._check_plan(plan)
        params, payload = self.inventory.trainable, self.algorithm.payload
        self.buckets = [
            Bucket(index, names, [params[name] for name in names], payload) for index, names in enumerate(plan.buckets)
        ]
        position = {name: index for index, name in enumerate(self._names)}
        self._bucket_of = [0] * len(self._names)
        self._views = [torch.empty(0)] * len(self._names)
        for bucket in self.buckets:
            for name, view in zip(bucket.names, bucket.views, strict=True):
                self._bucket_of[position[name]] = bucket.index
                self._views[position[name]] = view
        self._waiting = [len(bucket.params) for bucket in self.buckets]
        self._next = 0
        self._states.clear()
        self.algorithm.setup(self)

    def _check_plan(self, plan: Plan) -> None:
        if sorted(plan.order) != sorted(self._names):
            raise ValueError("plan: its parameters are not those of the module")
        for names in plan.buckets:
            if len({self.inventory.trainable[name].dtype for name in names}) != 1:
                raise ValueError(f"plan: the bucket of {names[0]!r} mixes dtypes")

    @property
    def plan(self) -> Plan | None:
        """The agreed plan, None before there is one."""
        return Plan(tuple(bucket.names for bucket in self.buckets)) if self.buckets else None

    @property
    def learned_plan(self) -> Plan | None:
        """The plan, if its order is that of gradients becoming ready."""
        return self.plan if self.algorithm.payload is Payload.GRAD else None

    # -- state, statistics, end --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The algorithm's own state on this rank; tensors are copies."""
        self.wait()
        plan = self.plan
        states = [
            {"exchange": repr(exchange), "bucket": bucket, "tensors": {k: t.clone() for k, t in state.items()}}
            for (exchange, bucket), state in self._states.items()
            if state
        ]
        return {
            "version": 1,
            "algorithm": repr(self.algorithm),
            "size": self.team.size,
            "rank": self.team.rank,
            "step": self.step,
            "plan": plan.to_json() if plan else None,
            "states": states,
        }

    @torch.no_grad()
    def load_state_dict(self, data: dict[str, Any]) -> None:
        """Go on from `data`, made by `state_dict` of the same algorithm, world size and rank.

        Raises:
            ValueError: it was made under other circumstances, or does not fit the module; names what differs.
        """
        self.wait()
        if data.get("version") != 1:
            raise ValueError(f"state dict: version {data.get('version')!r}, expected 1")
        for what, have in (("algorithm", repr(self.algorithm)), ("size", self.team.size), ("rank", self.team.rank)):
            if data[what] != have:
                raise ValueError(f"state dict: saved with {what} {data[what]}, loaded into {what} {have}")
        if data["plan"] is not None:
            plan = Plan.from_json(data["plan"])
            self._check_plan(plan)
            self._release_buckets()
            self.adopt_plan(plan)
        known = {(repr(exchange), bucket): state for (exchange, bucket), state in self._states.items()}
        for entry in data["states"]:
            state = known.get((entry["exchange"], entry["bucket"]))
            if state is None or state.keys() != entry["tensors"].keys():
                raise ValueError(f"state dict: no place for the state of {entry['exchange']}, bucket {entry['bucket']}")
            for key, tensor in entry["tensors"].items():
                if tensor.shape != state[key].shape:
                    raise ValueError(f"state dict: {key} of bucket {entry['bucket']} has shape {list(tensor.shape)}")
                state[key].copy_(tensor)
        self.step = data["step"]

    def stats(self) -> Stats:
        """A snapshot."""
        last, total = self._tally.snapshot()
        return Stats(
            algorithm=repr(self.algorithm),
            steps=self.step,
            num_buckets=len(self.buckets),
            bucket_bytes=tuple(bucket.nbytes for bucket in self.buckets),
            scratch_bytes=self.groups.buffers.nbytes,
            last=last,
            total=total,
            notices=self.notices,
        )

    def close(self) -> None:
        """Wait for the lane, give the parameters storage of their own again, and end the lane."""
        try:
            if self._open and not self._failed:
                self._end_pass()
            if not self._failed:
                self.wait()
        finally:
            self._release_buckets()
            self.lane.close()

    def _release_buckets(self) -> None:
        for bucket in self.buckets:
            bucket.release(self.algorithm.payload)
        self.buckets = []

    # -- failure -----------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._failed:
            raise CommunicationError(
                "an earlier exchange of this module failed; call bagua.distribute() again on all ranks, or restart"
            )

    def _fail(self, ticket: Ticket) -> None:
        """Raise what went wrong in the lane, with the ranks that give no sign of life."""
        self._failed = True
        self.lane.abandon()
        gone = self.team.missing(f"failed/{self._key}/{self._pass_index}", _ROLL_CALL_S)
        if len(gone) == self.team.size - 1 and self.team.size > 2:
            gone = []  # nobody else failed: they are alive and the fault is here, or unknowable
        who = f"; no sign of rank {', '.join(map(str, gone))}: gone, or late" if gone else ""
        error = ticket.error
        raise CommunicationError(
            f"rank {self.team.rank}, {ticket.label}: {type(error).__name__}: {error}{who}"
        ) from error


def _bits(flags: bytearray) -> int:
    """Flag i as bit i."""
    return int(bytes(flags[::-1]).translate(_ASCII), 2)


_ASCII = bytes([48, 49]) + bytes(254)

"""The engine of one distributed module: tells an algorithm the moments of each training step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bagua.algorithms.base import Algorithm, Exactness, Payload
from bagua.comm.team import Team, decode, encode
from bagua.engine.backward import Backward
from bagua.engine.bucket import Bucket
from bagua.engine.lane import Lane, StreamLane
from bagua.engine.launcher import Launcher
from bagua.engine.params import Inventory
from bagua.engine.plan import Entry, Plan, make_plan
from bagua.engine.quality import Guard
from bagua.engine.state import check_header, load_states, pack
from bagua.engine.stats import Stats
from bagua.engine.usage import UsageBoard
from bagua.exchanges import AllReduce

__all__ = ["Engine"]


class Engine(Launcher):
    """Runs one algorithm for one module. Implements `bagua.Context`, its larger part in `Launcher`.

    Holds no reference to the module: the module's entry in a weak dictionary holds the engine.

    Args:
        key: a name that is new for the team and equal on all ranks.
        order: parameter names in the order in which gradients become ready, if that is known already.
        notices: what the user should know of the options.
        guard: when to measure what compression loses, and what to do about it.
        num_lanes: lanes that may share the exchanges.
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
        guard: Guard | None = None,
        num_lanes: int = 1,
    ) -> None:
        super().__init__(algorithm, inventory, optimizers, team, lane, key, notices, guard, num_lanes)
        self.bucket_bytes = bucket_bytes
        self.paused = False
        self._names = list(inventory.trainable)
        self._root = algorithm  # what distribute() was given; `algorithm` changes when it hands over
        self._schedule: dict[int, Algorithm] = {}
        self._order = list(order) if order is not None else None
        self._stepped: set[int] = set()
        self._forward_seen = False  # in this step
        self._warned = False  # of quality, if nothing takes over
        self.backward = Backward(
            self._names,
            list(inventory.trainable.values()),
            UsageBoard(team.store, f"usage/{key}", team.rank, team.size, len(self._names)),
            views_are_gradients=algorithm.payload is Payload.GRAD,
            alone=team.size == 1,
            **_weak_callbacks(self),
        )
        self._start()

    # -- hand-overs ----------------------------------------------------------------------------------------------

    def at(self, step: int, algorithm: Algorithm) -> None:
        """Schedule a hand-over."""
        self._schedule[step] = algorithm

    def bind(self, algorithm: Algorithm) -> None:
        """Hand over now."""
        self.wait()
        self._close_more_lanes()
        same_payload = algorithm.payload is self.algorithm.payload
        plan = self.plan
        self.algorithm = algorithm
        self._states.clear()
        self._tensors.clear()
        self._scratch.clear()
        self.backward.views_are_gradients = algorithm.payload is Payload.GRAD
        if plan is not None and same_payload:
            algorithm.setup(self)
            return
        self._release_buckets()
        self.backward.set_buckets(())
        self._start()

    # -- moments of a step, called by the hooks ----------------------------------------------------------------

    def forward_begins(self) -> None:
        """Before a forward pass in training mode."""
        if self.backward.open and torch._C._current_graph_task_id() == -1:
            self.end_backward()  # the last backward pass was broken off by an exception
        if self._stepped:
            self._end_step()  # not all optimizers made a step
        for name, param in self.inventory.frozen.items():
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was frozen at bagua.distribute() and now requires a gradient; "
                    "call bagua.distribute() again after unfreezing, on all ranks"
                )
        if self.buckets and not self._forward_seen:
            self._forward_seen = True
            self.algorithm.on_forward(self)

    def end_backward(self) -> None:
        """Close the backward pass if one is open: its end went unnoticed, or an exception broke it off."""
        if self.backward.open:
            self.backward.end()

    def optimizer_stepped(self, number: int) -> None:
        """After a step of optimizer `number`."""
        self._stepped.add(number)
        if len(self._stepped) >= len(self.optimizers):
            self._end_step()

    def _end_step(self) -> None:
        self._stepped.clear()
        if self.buckets:
            self.algorithm.on_step_end(self)
            self._check_quality()
        self.step += 1
        self._forward_seen = False
        if self.step in self._schedule:
            self.algorithm.on_pause(self)
            self._average_weights()  # what takes over starts from equal replicas, and no rank's work is lost
            self.bind(self._schedule.pop(self.step))
        self._tally.step_ended()

    def _check_quality(self) -> None:
        probe = self._probe
        if probe is None or not probe.due(self.step) or self.team.size == 1:
            return
        if self.algorithm.exactness is Exactness.DECENTRALIZED and self.algorithm.payload is Payload.PARAM:
            flats, groups, step = [bucket.flat for bucket in self.buckets], self.groups, self.step
            run = partial(probe.compare_weights, flats, groups, step)
            self._tickets.append(self.lanes[0].submit(run, f"consensus step {step}"))
            self.wait()
        reason = probe.measured(self.step)
        if not reason:
            return
        fallback = probe.guard.fallback_on(self.groups.nodes)
        what = f"; {fallback!r} takes over" if fallback is not None else ""
        if what or not self._warned:
            self._warned = True
            self.notice(f"step {self.step}, {self.algorithm.name}: {reason}{what}", urgent=self.team.rank == 0)
        if fallback is not None:
            self.bind(fallback)

    def _on_first(self, seen: list[int]) -> None:
        """End of the first pass: agree on rank 0's order and make the buckets."""
        order = seen + [index for index in reversed(range(len(self._names))) if index not in set(seen)]
        names = encode([self._names[index] for index in order]) if self.team.rank == 0 else None
        self._order = decode(self.team.tell("agreement on the order of gradients", names))
        self._start()

    def _on_ready(self, bucket: Bucket) -> None:
        self.algorithm.on_ready(self, bucket)

    def _on_end(self) -> None:
        self._check_alive()
        self.algorithm.on_backward_end(self)
        if not self._optimizers:
            self._end_step()

    def _finish(self) -> None:
        self.wait()
        if isinstance(self.lanes[0], StreamLane):  # over, not only enqueued
            torch.cuda.current_stream(self.inventory.device).synchronize()

    # -- plan --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Make buckets if their order is known or does not matter; else the first backward pass will tell."""
        if self._order is not None or self.algorithm.payload is Payload.PARAM:
            self.adopt_plan(self._make_plan(self._order or list(reversed(self._names))))

    def _make_plan(self, order: Sequence[str]) -> Plan:
        params = self.inventory.trainable
        return make_plan(
            [
                Entry(name, params[name].numel() * params[name].element_size(), str(params[name].dtype))
                for name in order
            ],
            self.bucket_bytes,
        )

    def adopt_plan(self, plan: Plan) -> None:
        """Make buckets after `plan` and set the algorithm up on them.

        Raises:
            ValueError: the plan is not one of this module.
        """
        params, payload = self.inventory.trainable, self.algorithm.payload
        if sorted(plan.order) != sorted(self._names):
            raise ValueError("plan: its parameters are not those of the module")
        for names in plan.buckets:
            if len({params[name].dtype for name in names}) != 1:
                raise ValueError(f"plan: the bucket of {names[0]!r} mixes dtypes")
        self._close_more_lanes()
        self._release_buckets()
        self.buckets = [
            Bucket(index, names, [params[name] for name in names], payload) for index, names in enumerate(plan.buckets)
        ]
        self.backward.set_buckets(self.buckets)
        self._states.clear()
        self._tensors.clear()
        self._scratch.clear()
        self._open_lanes()
        self.algorithm.setup(self)

    @property
    def plan(self) -> Plan | None:
        """The agreed plan, None before there is one."""
        return Plan(tuple(bucket.names for bucket in self.buckets)) if self.buckets else None

    @property
    def learned_order(self) -> Sequence[str] | None:
        """Parameter names in the order in which their gradients become ready, if that is known."""
        return self._order

    # -- state, statistics, end --------------------------------------------------------------------------------

    def _circumstances(self) -> dict[str, Any]:
        return {"algorithm": repr(self._root), "size": self.team.size, "rank": self.team.rank}

    def state_dict(self) -> dict[str, Any]:
        """The algorithm's own state on this rank; tensors are copies."""
        self.wait()
        plan = self.plan
        header = {
            **self._circumstances(),
            "step": self.step,
            "order": self._order,
            "plan": plan.to_json() if plan else None,
        }
        return pack(header, self._states, self._tensors)

    def load_state_dict(self, data: dict[str, Any]) -> None:
        """Go on from `data`, made by `state_dict` of the same algorithm, world size and rank.

        Raises:
            ValueError: it was made under other circumstances, or does not fit the module; names what differs.
        """
        self.wait()
        check_header(data, self._circumstances())
        self.algorithm.on_load(self)
        self._order = data["order"]
        for step in sorted(step for step in self._schedule if step <= data["step"]):
            self.bind(self._schedule.pop(step))
        self.step = data["step"]
        if data["plan"] is not None:
            plan = Plan.from_json(data["plan"])
            if self.plan != plan:
                self.adopt_plan(plan)
            if self.plan != plan:
                raise ValueError("state dict: its buckets were made with another bucket_bytes")
        load_states(data, self._states, self._tensors, self.buckets)

    def stats(self) -> Stats:
        """A snapshot."""
        last, total = self._tally.snapshot()
        return Stats(
            algorithm=repr(self._root),
            steps=self.step,
            num_buckets=len(self.buckets),
            bucket_bytes=tuple(bucket.nbytes for bucket in self.buckets),
            scratch_bytes=sum(lane.groups.buffers.nbytes for lane in self.all_lanes),
            last=last,
            total=total,
            notices=self.notices,
            quality=self._probe.last if self._probe is not None else None,
            extra=dict(self._extra),
        )

    # -- what users ask for --------------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Stop what runs in the background, or let it run again."""
        self.paused = paused
        if paused:
            self.algorithm.on_pause(self)

    def average(self) -> None:
        """Make the replicas' weights equal to their mean."""
        self._check_alive()
        self.algorithm.on_pause(self)
        if self.algorithm.payload is not Payload.PARAM or self.team.size == 1:
            return
        # Before the exchange, so that a rank that stays away is named and breaks nothing.
        self.team.meet("bagua.average()", b"")
        self._average_weights()

    def _average_weights(self) -> None:
        if self.algorithm.payload is not Payload.PARAM or self.team.size == 1:
            return
        exchange = AllReduce()
        for bucket in self.buckets:
            if (exchange, bucket.index, 0) not in self._states:
                self.prepare(exchange, bucket)
            self.launch(exchange, bucket)
        self.wait()

    def close(self) -> None:
        """Wait for the lanes, give the parameters storage of their own again, and end the lanes."""
        try:
            if not self._failed:
                self.end_backward()
                self.wait()
        finally:
            self._close_more_lanes()
            self._release_buckets()
            for lane in self.lanes:
                lane.close()

    def _close_more_lanes(self) -> None:
        if self.buckets and not self._failed:
            self.algorithm.on_pause(self)
        self._kept.clear()
        for lane in self._more_lanes:
            lane.close()
        self._more_lanes.clear()

    def _release_buckets(self) -> None:
        for bucket in self.buckets:
            bucket.release(self.algorithm.payload)
        self.buckets = []


def _weak_callbacks(engine: Engine) -> dict[str, Any]:
    """The engine's ends of `Backward`, without a cycle: a dropped module is freed at once, not by the collector."""
    ref = weakref.ref(engine)

    def weak(name: str) -> Any:
        def call(*args: Any) -> None:
            alive = ref()
            if alive is not None:
                getattr(alive, name)(*args)

        return call

    return {name: weak(f"_{name}") for name in ("on_first", "on_ready", "on_end", "finish")}

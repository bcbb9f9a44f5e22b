"""The engine of one distributed module: tells an algorithm the moments of each training step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bagua.algorithms.base import Algorithm, Payload
from bagua.autotune import Settings
from bagua.comm.team import Team
from bagua.engine.backward import Backward
from bagua.engine.bucket import Bucket
from bagua.engine.lane import Lane
from bagua.engine.launcher import fitting_part_bytes
from bagua.engine.params import Inventory
from bagua.engine.plan import Entry, Plan, make_plan
from bagua.engine.quality import Guard
from bagua.engine.state import check_header, load_states, pack
from bagua.engine.stats import Stats
from bagua.engine.steps import Steps
from bagua.engine.tuning import Tuning
from bagua.engine.usage import UsageBoard
from bagua.exchanges import AllReduce

__all__ = ["Engine"]


class Engine(Steps):
    """Runs one algorithm for one module. Implements `bagua.Context`, its larger part in `Launcher` and `Steps`.

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
        self.tunes_hierarchy = False  # the lanes have groups for it, and the user left it open
        self._paused = False
        self._root = algorithm  # what distribute() was given; `algorithm` changes when it hands over
        self._order = list(order) if order is not None else None
        self.backward = Backward(
            self._names,
            list(inventory.trainable.values()),
            UsageBoard(team.store, f"usage/{key}", team.rank, team.size, len(self._names)),
            views_are_gradients=algorithm.payload is Payload.GRAD,
            alone=team.size == 1,
            **_weak_callbacks(self),
        )
        self._start()

    @property
    def paused(self) -> bool:
        """Whether the user wants nothing to begin in the background."""
        return self._paused

    # -- hand-overs ----------------------------------------------------------------------------------------------

    def at(self, step: int, algorithm: Algorithm) -> None:
        """Schedule a hand-over."""
        self._schedule[step] = algorithm

    def bind(self, algorithm: Algorithm) -> None:
        """Hand over now."""
        if self.tuning is not None:
            self.tuning.start_over(self)  # what fits one algorithm need not fit another
        self.wait()
        self._close_more_lanes()
        same_payload = algorithm.payload is self.algorithm.payload
        if self.inventory.sparse and not same_payload:
            raise ValueError(
                f"{algorithm.name!r} cannot take over from {self.algorithm.name!r}: one exchanges weights, the other "
                "gradients, and the module has sparse ones; call bagua.distribute() for that"
            )
        plan = self.plan
        if self.part_bytes == fitting_part_bytes(self.algorithm, self.team.size):
            self.part_bytes = fitting_part_bytes(algorithm, self.team.size)
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

    # -- plan --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Make buckets if their order is known or does not matter; else the first backward pass will tell."""
        if self._order is not None or self.algorithm.payload is Payload.PARAM:
            self.adopt_plan(self._make_plan(self._order or list(reversed(self._names))))

    def _make_plan(self, order: Sequence[str]) -> Plan:
        return make_plan(self.plan_entries(order), self.bucket_bytes)

    def plan_entries(self, order: Sequence[str] | None = None) -> list[Entry]:
        """What a plan is made of; in the agreed order if none is given."""
        params = self.inventory.trainable
        return [
            Entry(name, params[name].numel() * params[name].element_size(), str(params[name].dtype))
            for name in order or self._order or reversed(self._names)
        ]

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
    def settings(self) -> Settings:
        """What may be tuned, as it is."""
        hierarchical = bool(getattr(self.algorithm, "hierarchical", False))
        return Settings(self.bucket_bytes, self.num_lanes, self.part_bytes, self.direct_bytes, hierarchical)

    def check_settings(self, settings: Settings) -> None:
        """See whether this rank has what it takes: groups within and between nodes, memory for other buckets.

        Raises:
            RuntimeError: it has not.
        """
        if settings.hierarchical and self.groups.intra is None:
            raise RuntimeError("hierarchical: the lanes have no groups within and between nodes")
        if (settings.part_bytes is None) != (self.part_bytes is None):
            raise RuntimeError(
                f"part_bytes: {settings.part_bytes} where buckets are {'not ' * (not self.part_bytes)}cut"
            )
        if settings.bucket_bytes != self.bucket_bytes:
            _ = [torch.empty_like(bucket.flat) for bucket in self.buckets]

    def adopt_settings(self, settings: Settings) -> None:
        """Exchange in another way from now on. Collective, between steps; for exchanges without state, see `scope`."""
        self.wait()
        now = self.settings
        self.num_lanes, self.direct_bytes = settings.num_lanes, settings.direct_bytes
        self.bucket_bytes, self.part_bytes = settings.bucket_bytes, settings.part_bytes
        if settings.hierarchical != now.hierarchical:
            options: dict[str, Any] = {"hierarchical": settings.hierarchical}
            self.algorithm = replace(self.algorithm, **options)
        if not self.buckets:
            return
        if replace(settings, num_lanes=now.num_lanes, direct_bytes=now.direct_bytes) == now:
            self._open_lanes()  # buckets, and what exchanges keep of them, stay as they are
        else:
            self.adopt_plan(make_plan(self.plan_entries(), self.bucket_bytes))

    def _tune(self, tuning: Tuning) -> None:
        tuning.step_ended(self)

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
        plan, bound, tuned = self.plan, self.algorithm, None
        if self.tuning is not None:
            plan, bound, tuned = self.tuning.state_dict(self)
        header = {
            **self._circumstances(),
            "step": self.step,
            "bound": repr(bound),
            "order": self._order,
            "plan": plan.to_json() if plan else None,
            "tuned": tuned,
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
        tuned = self._tuned_in(data)
        self._order, self.step = data["order"], data["step"]
        if data["bound"] != repr(self.algorithm):
            self._rebind(data["bound"])
        if tuned is not None:
            self.tuning = Tuning(None)
            self.tuning.settle("loaded with the state", self.algorithm)
            self.adopt_settings(tuned)
        if data["plan"] is not None:
            plan = Plan.from_json(data["plan"])
            if self.plan != plan:
                self.adopt_plan(plan)
            if self.plan != plan:
                raise ValueError("state dict: its buckets were made with another bucket_bytes")
        load_states(data, self._states, self._tensors, self.buckets)

    def _tuned_in(self, data: dict[str, Any]) -> Settings | None:
        """The settings found best before the state was saved, among as many ranks; else tune anew, if at all."""
        if self.tuning is not None:
            self.tuning.start_over(self)
        tuned = data.get("tuned")
        if tuned is None or tuned["size"] != self.team.size:
            return None
        settings = Settings.from_json(tuned["settings"])
        try:
            self.check_settings(settings)
        except RuntimeError as error:
            self.notice(f"state dict: the settings it was tuned to cannot be had here: {error}", urgent=True)
            return None
        return settings

    def _rebind(self, bound: str) -> None:
        """Hand over to what ran when a state was saved: before or after a hand-over, or a guard's fallback.

        Raises:
            ValueError: the algorithm given to `distribute` does not come to that.
        """
        self._schedule.clear()
        self.bind(self._root)  # looks at the step
        fallback = self._probe.guard.fallback_on(self.groups.nodes) if self._probe is not None else None
        if fallback is not None and repr(fallback) == bound != repr(self.algorithm):
            self.bind(fallback)
        if repr(self.algorithm) != bound and self.buckets:
            raise ValueError(f"state dict: saved while {bound} ran, which {self._root!r} does not at step {self.step}")

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
            tuning=self.tuning.progress(self.settings) if self.tuning is not None else None,
        )

    # -- what users ask for --------------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Stop what runs in the background, or let it run again."""
        self._paused = paused
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
        exchange, known = AllReduce(), set(self._states)
        for bucket in self.buckets:
            if (exchange, bucket.index, 0) not in known:
                self.prepare(exchange, bucket)
            self.launch(exchange, bucket)
        self.wait()
        for key in set(self._states) - known:
            del self._states[key]

    def close(self) -> None:
        """Wait for the lanes, give the parameters storage of their own again, and end the lanes."""
        try:
            if not self._failed:
                self.end_backward()
                self.wait()
        finally:
            self._close_more_lanes()
            self._release_buckets()
            for lane in self.all_lanes:
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

    return {name: weak(f"_{name}") for name in ("on_begin", "on_first", "on_ready", "on_end", "finish")}

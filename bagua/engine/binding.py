"""Which algorithm runs on which buckets, and with which settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bagua.algorithms.base import Algorithm, Payload
from bagua.algorithms.identity import same_state
from bagua.autotune import Settings
from bagua.comm.groups import Groups
from bagua.engine.config import EngineConfig
from bagua.engine.lanes.dispatcher import fitting_part_bytes, is_plain_sum
from bagua.engine.parts import ExchangeParts, TrainingParts
from bagua.engine.reducer.bucket import Bucket
from bagua.engine.reducer.bucketing import Entry, Plan, check_plan, make_plan
from bagua.engine.reducer.reducer import Reducer
from bagua.engine.tuning.session import TuningSession
from bagua.engine.tuning.site_trial import run_trial, tried_parts
from bagua.exchanges import Exchange

__all__ = ["Binding"]


class Binding:
    """Binds an algorithm to buckets and settings: makes buckets, runs `setup`, switches algorithms, adopts settings.

    Implements `Tunable`, through which autotuning sees it.

    Attributes:
        tuning: the session that tunes it, or None.
        tunes_hierarchy: the lanes have groups for a hierarchy, and the user left it open.
        forms: the algorithm given to `distribute`; where sums within sites are open, with them and without. One of
            them is the root.
    """

    def __init__(
        self,
        training: TrainingParts,
        exchanges: ExchangeParts,
        reducer: Reducer,
        config: EngineConfig,
        tuning: TuningSession | None,
    ) -> None:
        self.tuning = tuning
        self.tunes_hierarchy = config.tunes_hierarchy
        root = training.state.root
        self.forms: tuple[Algorithm, ...] = (root,) if config.flat is None else (root, config.flat)
        self._trial_due = config.tries_sites
        self.team = training.team
        self._state, self._inventory, self._optimizers = training.state, training.inventory, training.optimizers
        self._pool, self._dispatcher, self._memory = exchanges.pool, exchanges.dispatcher, exchanges.memory
        self._reducer, self._ctx = reducer, exchanges.context
        self._names = list(self._inventory.trainable)

    # -- switches ----------------------------------------------------------------------------------------------

    def bind(self, algorithm: Algorithm) -> None:
        """Switch now.

        Raises:
            ValueError: the payload differs and the module has sparse gradients.
        """
        state = self._state
        if self.tuning is not None:
            self.tuning.start_over(self)  # what fits one algorithm need not fit another
        self._dispatcher.wait()
        self.close_extra_lanes()
        same_payload = algorithm.payload is state.algorithm.payload
        if self._inventory.sparse and not same_payload:
            raise ValueError(
                f"{algorithm.name!r} cannot take over from {state.algorithm.name!r}: one exchanges weights, the other "
                "gradients, and the module has sparse gradients; call bagua.distribute() to switch between them"
            )
        plan, size = self.plan, self.team.size
        if self._dispatcher.part_bytes == fitting_part_bytes(state.algorithm, size):
            self._dispatcher.part_bytes = fitting_part_bytes(algorithm, size)
        state.algorithm = algorithm
        self._memory.forget_tensors()
        self._reducer.views_are_gradients = algorithm.payload is Payload.GRAD
        if plan is not None and same_payload:
            algorithm.setup(self._ctx)
            return
        self.release_buckets()
        self._reducer.set_buckets(())
        self.start()

    def go_on_with(self, algorithm: Algorithm, kept: Mapping[tuple[str, int], Tensor]) -> None:
        """Of an engine that will be replaced: hold what the next one takes over, of an algorithm it may not have run.

        Args:
            kept: by name and bucket.
        """
        if type(algorithm) is not type(self._state.algorithm):
            self.release_buckets()
            self._state.algorithm = algorithm
            self._memory.forget_tensors()
        self._memory.tensors.update(kept)

    def rebind(self, bound: str, fallback: Algorithm | None) -> None:
        """Switch to the algorithm that ran when a state was saved: scheduled, or a guard's fallback.

        Raises:
            ValueError: the algorithm given to `distribute` never switches to that one.
        """
        state = self._state
        state.schedule.clear()
        self.bind(state.root)  # looks at the step
        if fallback is not None and same_state(bound, fallback) and not same_state(bound, state.algorithm):
            self.bind(fallback)
        known = (state.algorithm, state.root)  # the root's: saved before setup
        if state.buckets and not any(same_state(bound, each) for each in known):
            raise ValueError(
                f"state dict: saved while {bound} ran, but at step {state.step} {state.root!r} runs another algorithm"
            )

    # -- buckets -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make buckets if their order is known or irrelevant; otherwise the first backward pass records it."""
        state = self._state
        if state.order is not None or state.algorithm.payload is Payload.PARAM:
            self.adopt_plan(self.plan_with(state.bucket_bytes))

    def plan_entries(self, order: Sequence[str] | None = None) -> list[Entry]:
        """Return name, size and dtype of each parameter; in the agreed order if none is given."""
        params = self._inventory.trainable
        return [
            Entry(name, params[name].numel() * params[name].element_size(), str(params[name].dtype))
            for name in order or self._state.order or reversed(self._names)
        ]

    def plan_with(self, bucket_bytes: int) -> Plan:
        """Return the plan for buckets of `bucket_bytes`."""
        return make_plan(self.plan_entries(), bucket_bytes, self.starts_early)

    @property
    def starts_early(self) -> bool:
        """Whether the first bucket is small."""
        algorithm = self._state.algorithm
        cuts = self._dispatcher.part_bytes is not None
        return cuts and algorithm.payload is Payload.GRAD and is_plain_sum(algorithm)

    def adopt_plan(self, plan: Plan) -> None:
        """Make buckets after `plan` and set the algorithm up on them.

        Raises:
            ValueError: the plan is not one of this module.
        """
        state, params = self._state, self._inventory.trainable
        payload = state.algorithm.payload
        check_plan(plan, self._names)
        for names in plan.buckets:
            if len({params[name].dtype for name in names}) != 1:
                raise ValueError(f"plan: the bucket of {names[0]!r} mixes dtypes")
        self.close_extra_lanes()
        self.release_buckets()
        state.buckets = [
            Bucket(index, names, [params[name] for name in names], payload) for index, names in enumerate(plan.buckets)
        ]
        self._reducer.set_buckets(state.buckets)
        self._memory.forget_tensors()
        self._pool.open_shared(self.num_busy_lanes)
        if self._trial_due and state.algorithm is state.root:
            self._try_sites()
        state.algorithm.setup(self._ctx)

    def _try_sites(self) -> None:
        """Measure once whether the ranks of a site sum first. Collective; nothing is prepared yet."""
        self._trial_due = False
        state, (sites, flat) = self._state, self.forms
        with self._dispatcher.as_of(tried_parts(sites, flat)[1]):
            trial = run_trial(self._dispatcher, self.team, state.buckets, sites, flat)
        for lane in self._pool.shared:
            lane.groups.buffers.clear()  # which the other form may need and this one not
        state.notice(trial.told)
        state.root = state.algorithm = flat if trial.flat_wins else sites

    def adopt_form(self, form: Algorithm) -> None:
        """Of a state that is being loaded: it was saved with this one of `forms`."""
        self._trial_due = False
        if form is not self._state.root:
            self._state.root = form
            self.bind(form)

    @property
    def plan(self) -> Plan | None:
        """The assignment of parameters to buckets, None before there is one."""
        return Plan(tuple(bucket.names for bucket in self._state.buckets)) if self._state.buckets else None

    def close_extra_lanes(self) -> None:
        """Finish background exchanges and close the algorithm's lanes."""
        if self._state.buckets and not self._dispatcher.failed:
            self._state.algorithm.on_pause(self._ctx)
        self._memory.forget_objects()
        self._pool.close_extra()

    def release_buckets(self) -> None:
        """Give the parameters storage of their own again."""
        for bucket in self._state.buckets:
            bucket.release(self._state.algorithm.payload)
        self._state.buckets = []

    # -- settings ------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        state, dispatcher = self._state, self._dispatcher
        hierarchical = bool(getattr(state.algorithm, "hierarchical", False))
        return Settings(
            state.bucket_bytes, self._pool.num_lanes, dispatcher.part_bytes, dispatcher.direct_bytes, hierarchical
        )

    def check_settings(self, settings: Settings) -> None:
        """Check whether this rank has groups within and between nodes, and memory for other buckets.

        Raises:
            RuntimeError: it has not.
        """
        part_bytes = self._dispatcher.part_bytes
        if settings.hierarchical and self.groups.intra is None:
            raise RuntimeError("hierarchical: the lanes have no groups within and between nodes")
        if (settings.part_bytes is None) != (part_bytes is None):
            raise RuntimeError(f"part_bytes: {settings.part_bytes} where buckets are {'not ' * (not part_bytes)}cut")
        if settings.bucket_bytes != self._state.bucket_bytes:
            _ = [torch.empty_like(bucket.flat) for bucket in self._state.buckets]

    def adopt_settings(self, settings: Settings) -> None:
        """Exchange with `settings` from now on. Collective, between steps; for exchanges that keep no state."""
        state, pool, dispatcher = self._state, self._pool, self._dispatcher
        dispatcher.wait()
        now = self.settings
        pool.num_lanes, dispatcher.direct_bytes = settings.num_lanes, settings.direct_bytes
        state.bucket_bytes, dispatcher.part_bytes = settings.bucket_bytes, settings.part_bytes
        if settings.hierarchical != now.hierarchical:
            options: dict[str, Any] = {"hierarchical": settings.hierarchical}
            state.algorithm = replace(state.algorithm, **options)
        if not state.buckets:
            return
        if replace(settings, num_lanes=now.num_lanes, direct_bytes=now.direct_bytes) == now:
            pool.open_shared(self.num_busy_lanes)  # buckets, and what exchanges keep of them, stay as they are
        else:
            self.adopt_plan(self.plan_with(state.bucket_bytes))

    # -- what tuning reads ---------------------------------------------------------------------------------------

    @property
    def num_opened(self) -> int:
        """Lanes ever opened beside the first one."""
        return self._pool.num_opened

    @num_opened.setter
    def num_opened(self, value: int) -> None:
        self._pool.num_opened = value

    @property
    def groups(self) -> Groups:
        """Process groups of the first lane."""
        return self._pool.groups

    @property
    def device(self) -> torch.device:
        """The device of all parameters."""
        return self._inventory.device

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in force."""
        return self._state.algorithm

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that are followed."""
        return self._optimizers.alive

    @property
    def step(self) -> int:
        """Training steps completed so far."""
        return self._state.step

    @property
    def hand_overs(self) -> Sequence[int]:
        """Steps after which another algorithm takes over."""
        return sorted(self._state.schedule)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """All buckets, in the order of exchange."""
        return self._state.buckets

    @property
    def element_bytes(self) -> dict[str, int]:
        """Bytes of an element of each trainable parameter."""
        return {name: param.element_size() for name, param in self._inventory.trainable.items()}

    @property
    def exchanges(self) -> set[Exchange]:
        """The exchanges that the algorithm has prepared."""
        return self._memory.exchanges

    @property
    def keeps_state(self) -> bool:
        """Whether exchanges or the algorithm keep tensors between steps."""
        return self._memory.keeps_state

    @property
    def num_open_lanes(self) -> int:
        """Lanes that are open."""
        return len(self._pool.shared)

    @property
    def num_busy_lanes(self) -> int:
        """Lanes that can be busy at once."""
        return self._dispatcher.num_busy_lanes

    def close_lanes(self, keep: int) -> None:
        """Close all lanes but the first `keep`, between steps."""
        self._pool.close_shared(keep)

    def line_up(self) -> None:
        """Barrier: return at about the same time on all ranks. Collective."""
        self._dispatcher.line_up()

    def notice(self, text: str, urgent: bool = False) -> None:
        """Log `text` and keep it."""
        self._state.notice(text, urgent)

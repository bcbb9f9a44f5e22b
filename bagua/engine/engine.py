"""The engine of one distributed module: composes its parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch

from bagua.algorithms.base import Algorithm, Exactness, Payload
from bagua.algorithms.identity import same_state
from bagua.algorithms.options import describe
from bagua.autotune import Settings
from bagua.comm.groups import Groups
from bagua.comm.team import Team
from bagua.engine.algorithm_memory import AlgorithmMemory
from bagua.engine.binding import Binding
from bagua.engine.choosing import Chooser, probe_of
from bagua.engine.config import EngineConfig
from bagua.engine.context import EngineContext
from bagua.engine.failures import Failures
from bagua.engine.followed_optimizers import FollowedOptimizers
from bagua.engine.lanes.dispatcher import Dispatcher
from bagua.engine.lanes.lane import Lane
from bagua.engine.lanes.pool import LanePool
from bagua.engine.loaded_weights import note_load
from bagua.engine.optimizer_steps import OptimizerSteps
from bagua.engine.parts import ExchangeParts, TrainingParts
from bagua.engine.recovery.manager import RecoveryManager
from bagua.engine.reducer.bucket import Bucket
from bagua.engine.reducer.bucketing import Plan, check_plan
from bagua.engine.reducer.reducer import Reducer
from bagua.engine.reducer.unused_params import UsageBoard
from bagua.engine.replicas import Replicas
from bagua.engine.startup.inventory import Inventory
from bagua.engine.state_dict import check_header, check_order, load_states, naming_optimizers, pack
from bagua.engine.stats import Stats, StepStats, Tally
from bagua.engine.step_tracker import StepTracker
from bagua.engine.training_state import TrainingState
from bagua.engine.tuning.session import TuningSession
from bagua.errors import CommunicationError

__all__ = ["Engine"]


class Engine:
    """Runs one algorithm for one module. Composes the parts; no part refers to the engine.

    Holds no reference to the module: the module's entry in a weak dictionary holds the engine.

    Args:
        config: settings on which the ranks have agreed.
        algorithm: fitted to the nodes.
        lane: the first one.
        key: a name that is new for the team and equal on all ranks.
        order: parameter names in the order in which gradients become ready, if that is known already.
        notices: remarks on the options that were already shown to the user.
        tuning: the session that tunes the settings, or None.
        recovery: trains on without ranks that are lost, or None.
        step: training steps completed before.
        chooser: of the algorithm, if the user left it open.

    Attributes:
        config: as given.
        state: algorithm, buckets, step: what changes.
        inventory: the module's tensors.
        followed: the optimizers whose steps count.
        pool, dispatcher: lanes, and launches on them.
        memory: what exchanges and the algorithm keep.
        reducer: backward passes.
        context: what the algorithm sees.
        binding: buckets and settings of the algorithm in force.
        replicas: makes the ranks' weights equal.
        tracker, optimizer_steps: called by the hooks.
        failures: what ends the exchanges.
    """

    def __init__(
        self,
        config: EngineConfig,
        algorithm: Algorithm,
        inventory: Inventory,
        optimizers: Sequence[torch.optim.Optimizer],
        team: Team,
        lane: Lane,
        key: str,
        order: Sequence[str] | None = None,
        notices: Sequence[str] = (),
        tuning: TuningSession | None = None,
        recovery: RecoveryManager | None = None,
        step: int = 0,
        chooser: Chooser | None = None,
    ) -> None:
        self.config = config
        names, params = list(inventory.trainable), list(inventory.trainable.values())
        self.inventory, self.team = inventory, team
        self.state = TrainingState(
            algorithm, algorithm, config.bucket_bytes, list(order) if order is not None else None, team.rank
        )
        self.state.step = step
        self.state.keep_notices(notices)
        if config.guard is not None and algorithm.exactness is Exactness.ASYNCHRONOUS:
            self.state.notice(f"guard: averages in the background, as of {algorithm.name}, are not measured")
        self.followed = FollowedOptimizers(optimizers)
        self._tally = Tally(lane.groups.meters, team.size)
        self._probe = probe_of(config.guard, chooser is not None)
        self.pool = LanePool(
            lane,
            team,
            inventory.device,
            key,
            config.num_lanes,
            config.lanes_of_sums,
            config.lanes_of_wide,
            config.straight_chunk_bytes,
            config.bdp_bytes,
            self._tally.watch,
        )
        self.memory = AlgorithmMemory(self.pool.adopt)
        usage = UsageBoard(team.store, f"usage/{key}", team.rank, team.size, len(names))
        weakref.finalize(self, team.retire, usage.keys).atexit = False
        self.reducer = Reducer(
            names,
            params,
            usage,
            self.state,
            views_are_gradients=algorithm.payload is Payload.GRAD,
            static_graph=config.static_graph,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            alone=team.size == 1,
        )
        self.failures = Failures(self.state, team, self.pool, self.reducer, key, recovery)
        if recovery is not None:
            recovery.watch(self.pool)
        self.dispatcher = Dispatcher(self.state, team, self.pool, self.memory, self.failures, self._tally, self._probe)
        self.context = EngineContext(self.state, self.followed, self.pool, self.dispatcher, self.memory, self.failures)
        training = TrainingParts(key, self.state, inventory, team, self.followed)
        exchanges = ExchangeParts(self.pool, self.dispatcher, self.memory, self.failures, self.context)
        self.binding = Binding(training, exchanges, self.reducer, config, tuning)
        self.context.use_binder(self.binding)
        self.replicas = Replicas(training, exchanges)
        self.tracker = StepTracker(
            training,
            exchanges,
            self.reducer,
            self.binding,
            self.replicas,
            self._tally,
            self._probe,
            broadcasts_buffers=config.broadcast_buffers and team.size > 1 and bool(inventory.buffers),
            chooser=chooser,
        )
        self.reducer.listen(self.tracker)
        self.optimizer_steps = OptimizerSteps(training, exchanges, self.reducer, self.tracker)
        self.binding.start()

    # -- what others look at -------------------------------------------------------------------------------------

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in force."""
        return self.state.algorithm

    @property
    def buckets(self) -> Sequence[Bucket]:
        """All buckets, in the order of exchange."""
        return self.state.buckets

    @property
    def step(self) -> int:
        """Training steps completed."""
        return self.state.step

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that are followed and still exist."""
        return self.followed.alive

    @property
    def groups(self) -> Groups:
        """Rank, size and nodes."""
        return self.pool.groups

    @property
    def failed(self) -> bool:
        """Whether exchanges have ended, or a backward pass was interrupted by an exception."""
        return self.failures.any

    def stats(self) -> Stats:
        """A snapshot."""
        state, tuning, recovery = self.state, self.binding.tuning, self.failures.recovery
        last, total = self._tally.snapshot()
        return Stats(
            algorithm=self.told(describe),
            steps=state.step,
            num_buckets=len(state.buckets),
            bucket_bytes=tuple(bucket.nbytes for bucket in state.buckets),
            scratch_bytes=sum(lane.groups.buffers.nbytes for lane in self.pool.all),
            last=last,
            total=total,
            notices=state.notices,
            quality=self._probe.last if self._probe is not None else None,
            extra=dict(self.memory.series),
            tuning=tuning.progress(self.binding.settings) if tuning is not None else None,
            membership=recovery.changes if recovery is not None else (),
            rank=self.team.rank,
            size=self.team.size,
        )

    def told(self, text_of: Callable[[Algorithm], str]) -> str:
        """The algorithm given to `distribute`, and the one in force if it chooses that. From any thread."""
        root, in_force = self.state.root, self.state.algorithm
        chosen = self.tracker.chooser is not None and in_force is not root
        return f"{text_of(root)}: {text_of(in_force)}" if chosen else text_of(root)

    @property
    def costs(self) -> StepStats:
        """Of all steps that have ended. Only read, so from any thread."""
        return self._tally.total

    def carry_statistics(self, old: Engine) -> None:
        """Count on from an engine whose members have changed."""
        self._tally.carry(old._tally)
        self.memory.series.update(old.memory.series)

    # -- state ---------------------------------------------------------------------------------------------------

    def _circumstances(self) -> dict[str, Any]:
        return {"algorithm": repr(self.state.root), "size": self.team.size, "rank": self.team.rank}

    @property
    def kinds(self) -> list[str]:
        """Class names of the optimizers."""
        return [type(optimizer).__name__ for optimizer in self.optimizers]

    def state_dict(self) -> dict[str, Any]:
        """The algorithm's own state on this rank; tensors are copies."""
        self.dispatcher.wait()
        if self.tracker.gradients_wait:
            self.state.notice(
                "bagua.state_dict: taken between a backward pass and the optimizer's step, or within accumulation: "
                "gradients that no optimizer has applied yet are not saved, and a resumed training lacks them; save "
                "after the step",
                urgent=True,
            )
        binding = self.binding
        plan, bound, tuned = binding.plan, self.state.algorithm, None
        if binding.tuning is not None:
            plan, bound, tuned = binding.tuning.state_dict(binding)
        header = {
            **self._circumstances(),
            "optimizers": self.kinds,
            "rank_order": list(self.team.order),
            "step": self.state.step,
            "stepped": sorted(self.tracker.stepped),
            "loss_scale": self.tracker.units.save(),
            "bound": repr(bound),
            "replicas_differ": self.replicas.differ,
            "order": self.state.order,
            "plan": plan.to_json() if plan else None,
            "tuned": tuned,
            "chosen": self.tracker.chooser.state_dict() if self.tracker.chooser is not None else None,
        }
        with self.state.algorithm.saving(self.context) if self.state.buckets else nullcontext():
            return pack(header, self.memory.states, self.memory.tensors)

    def load_state_dict(self, data: dict[str, Any]) -> None:
        """Restore `data`, made by `state_dict` with the same algorithm, world size and rank.

        Where a choice of the algorithm is made anew, training begins with full precision, equal weights and fresh
        state of the algorithm. Collective then.

        Raises:
            TypeError: it is no dict.
            ValueError: it was saved with another configuration, or does not fit the module; names what differs.
        """
        if not isinstance(data, dict):
            raise TypeError(f"state dict: expected what bagua.state_dict(model) returned, got {type(data).__name__}")
        state, binding = self.state, self.binding
        if self.failures.recovery is not None:
            raise ValueError("state dict: a fault-tolerant module counts its steps with the other hosts, from 0")
        self.dispatcher.wait()
        form = self.form_of(data.get("algorithm"))
        if form is not None and data.get("plan") is None:  # of before a trial
            data, form = self._as_now(data), None
        have = self._circumstances()
        if same_state(data.get("algorithm"), form or state.root):
            del have["algorithm"]
        check_header(data, have)
        self.check_parameters(data)
        anew = self.chooses_anew(data)
        if anew:
            data = {**data, "states": [], "tensors": []}
        check_order(data, self.team.order)
        state.algorithm.on_load(self.context)
        if form is not None:
            binding.adopt_form(form)
        tuned = self._tuned_in(data)
        stale = self._has_moved_on(data)
        state.step, state.before_load = data["step"], None
        if data["order"] is not None or not state.buckets:  # saved before the first pass, after which it stays
            state.order = data["order"]
        fallback = self._probe.guard.fallback_on(self.groups.nodes) if self._probe is not None else None
        if self.tracker.chooser is not None and data.get("chosen") is not None:
            chosen = self.tracker.chooser.load_state_dict(data["chosen"], self.optimizers)
            if anew:
                data["bound"] = repr(chosen)
            fallback = chosen if same_state(data["bound"], chosen) else fallback
        if stale or not same_state(data["bound"], state.algorithm):
            binding.rebind(data["bound"], fallback)
            state.algorithm.on_load(self.context)
        if tuned is not None:
            binding.tuning = TuningSession(None)
            binding.tuning.settle("loaded with the state", state.algorithm)
            binding.adopt_settings(tuned)
        if data["plan"] is not None:
            plan = Plan.from_json(data["plan"])
            if binding.plan != plan:
                binding.adopt_plan(plan)
            if binding.plan != plan:
                raise ValueError("state dict: its buckets were made with another bucket_bytes")
        with naming_optimizers(data.get("optimizers"), self.kinds):
            load_states(data, self.memory.states, self.memory.tensors, state.buckets, self.groups)
        if "loss_scale" in data:  # earlier versions did not save it
            self.tracker.units.load(data["loss_scale"])
        if anew and data.get("replicas_differ", True):
            self.replicas.equalise()
        self.tracker.go_on_within(data.get("stepped", ()))

    def check_parameters(self, data: Mapping[str, Any]) -> None:
        """Refuse a state of other parameters than those that the module trains.

        Raises:
            ValueError: names them.
        """
        if data.get("plan") is not None:
            check_plan(Plan.from_json(data["plan"]), list(self.inventory.trainable))

    def _has_moved_on(self, data: Mapping[str, Any]) -> bool:
        """Whether this module has trained past `data`: switches that come after it are over, or it has no state yet."""
        state = self.state
        if self.tracker.chooser is not None:
            return False
        switches = state.root is not state.algorithm and data["step"] < state.step
        return switches or (data["plan"] is None and bool(state.buckets))

    def chooses_anew(self, data: Mapping[str, Any]) -> bool:
        """Whether the choice of the algorithm in `data` was not made yet, or does not hold for the nodes of now."""
        chooser, chosen = self.tracker.chooser, data.get("chosen")
        return chooser is not None and chosen is not None and not chooser.holds(chosen)

    def weights_are_loaded(self) -> None:
        """`load_state_dict` of the module, or of a part of it, is about to replace weights."""
        note_load(self.state)

    def form_of(self, saved: object) -> Algorithm | None:
        """The form of the algorithm that a state was saved with, as text; None: a state of another algorithm."""
        return next((form for form in self.binding.forms if same_state(saved, form)), None)

    def _as_now(self, data: dict[str, Any]) -> dict[str, Any]:
        """A state without buckets, as if the form of now had been chosen when it was saved."""
        now = repr(self.state.root)
        bound = data.get("bound")
        return {**data, "algorithm": now, "bound": now if bound == data["algorithm"] else bound}

    def _tuned_in(self, data: dict[str, Any]) -> Settings | None:
        """The settings found best before the state was saved, among as many ranks; else tune anew, if at all."""
        binding = self.binding
        if binding.tuning is not None:
            binding.tuning.start_over(binding)
        tuned = data.get("tuned")
        if tuned is None or tuned["size"] != self.team.size:
            return None
        settings = Settings.from_json(tuned["settings"])
        try:
            binding.check_settings(settings)
        except RuntimeError as error:
            self.state.notice(f"state dict: its tuned settings cannot be applied here: {error}", urgent=True)
            return None
        return settings

    # -- what users ask for --------------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Pause or resume background communication."""
        self.state.paused = paused
        if paused and not self.failures.trains_alone:
            self.state.algorithm.on_pause(self.context)

    def settle(self, average: bool) -> None:
        """Complete all exchanges before another engine replaces this one.

        Args:
            average: make the replicas' weights equal too. False where an engine of some rank has failed: what this
                rank can no longer complete is then dropped.
        """
        if average:
            self.tracker.end_backward()
            self.dispatcher.wait()
            self.replicas.average()
        elif not self.failures.final:
            with suppress(CommunicationError):
                self.tracker.end_backward()
                if self.state.buckets:
                    self.state.algorithm.on_pause(self.context)
                self.dispatcher.wait()

    def close(self) -> None:
        """Wait for the lanes, give the parameters storage of their own again, and end the lanes."""
        try:
            if not self.failures.any:
                self.tracker.end_backward()
                self.dispatcher.wait()
        except CommunicationError:
            if self.failures.recovery is None:
                raise  # else another rank has ended, or was lost, and no step of this one needs the exchange any more
        finally:
            self.binding.close_extra_lanes()
            self.binding.release_buckets()
            self.pool.close()

    def stop(self, timeout_s: float) -> None:
        """End the lanes at the end of the process."""
        if self.failures.recovery is not None:
            self.failures.recovery.stop(timeout_s)
        self.pool.stop(timeout_s)

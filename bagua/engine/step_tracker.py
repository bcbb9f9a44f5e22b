"""The step tracker: turns hook events into training steps and calls the algorithm's moments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from bagua.algorithms.base import Algorithm, LostStep, Payload
from bagua.comm.store_team import decode, encode
from bagua.engine.announcer import Announcer, Moment
from bagua.engine.binding import Binding
from bagua.engine.choosing import Chooser, EngineChoices
from bagua.engine.discarded_passes import DiscardedPasses, holds_gradients
from bagua.engine.first_weights import FirstWeights
from bagua.engine.guard import Probe
from bagua.engine.lanes.stream_lane import StreamLane
from bagua.engine.loaded_weights import tell_of_loaded_weights
from bagua.engine.missing_steps import look_for_steps, tell_of_copied_weights
from bagua.engine.nested_steps import Nesting
from bagua.engine.parts import ExchangeParts, TrainingParts
from bagua.engine.payload_units import PayloadUnits
from bagua.engine.quality_check import QualityCheck
from bagua.engine.reducer.bucket import Bucket
from bagua.engine.reducer.graph_task import refuse_capture
from bagua.engine.reducer.pass_watch import PassWatch
from bagua.engine.reducer.reducer import Reducer
from bagua.engine.reducer.sparse import exchange_sparse
from bagua.engine.reducer.unused_feedback import Withheld
from bagua.engine.replicas import Replicas
from bagua.engine.second_passes import refuse_second_pass
from bagua.engine.skipped_steps import refuse_plain_scaler, scale_of_step, steps_by_plain_scaler
from bagua.engine.stats import Tally
from bagua.engine.step_listeners import StepListeners
from bagua.engine.steps_without_passes import StepsWithoutPasses
from bagua.errors import CommunicationError

__all__ = ["StepTracker"]


class StepTracker:
    """Receives forward passes, backward passes and optimizer steps, in the training thread.

    That is the thread of the last forward pass with gradients, or of `distribute`. It may change between passes.
    Implements `PassListener`, through which the reducer tells of backward passes.

    Attributes:
        broadcasts_buffers: forward passes begin with rank 0's buffers.
        buffers_due: the next one does: the last one was to be synchronised, or there was none.
        joining: within `bagua.join`, tells ranks that have run out of inputs.
        hooks_ran: those of the module's forward pass, in this step.
        forward_seen, forward_told, step_begun: in this step. The second one: a pass with gradients, of which the
            algorithm was told; the step was begun by the first optimizer.
        stepped: numbers of the optimizers that have stepped, in this step.
        nesting: steps of optimizers that are in progress.
        ending: all optimizers have stepped, and the exchange with which the step ends has not succeeded yet.
        listeners: told of each step that was counted.
        chooser: of the algorithm, if the user left it open.
        units: of what exchanges keep.
        thread: of the training.
    """

    def __init__(
        self,
        training: TrainingParts,
        exchanges: ExchangeParts,
        reducer: Reducer,
        binding: Binding,
        replicas: Replicas,
        tally: Tally,
        probe: Probe | None,
        *,
        broadcasts_buffers: bool,
        chooser: Chooser | None = None,
    ) -> None:
        self.broadcasts_buffers, self.buffers_due = broadcasts_buffers, True
        self.joining: Announcer | None = None
        self.hooks_ran = self.forward_seen = self.forward_told = self.step_begun = self.ending = False
        self.thread = threading.get_ident()
        self.stepped: set[int] = set()
        self.nesting = Nesting()
        self.listeners = StepListeners()
        self._key, self._state, self._inventory = training.key, training.state, training.inventory
        self._team, self._optimizers = training.team, training.optimizers
        self._pool, self._dispatcher, self._memory = exchanges.pool, exchanges.dispatcher, exchanges.memory
        self._failures, self._ctx = exchanges.failures, exchanges.context
        self._reducer, self._binding, self._replicas = reducer, binding, replicas
        self._tally = tally
        self.chooser = chooser
        # Made when asked for: what is replaced after a loss must go without the garbage collector, so no cycles here.
        self._choices = partial(EngineChoices, training, exchanges, tally, probe)
        self._names = list(self._inventory.trainable)
        self._buffers_told = False  # in this step
        self._shadowed = False  # a backward pass of others, in this step
        self._passed = False  # a synchronised backward pass is over, in this step
        self._quality = QualityCheck(training, exchanges, probe)
        self._watch = PassWatch(list(self._inventory.parameters.values()))
        self._withheld = Withheld()
        self._discarded = DiscardedPasses(training, exchanges)
        self.units = PayloadUnits(training, exchanges)
        self._first_weights = FirstWeights(training, exchanges)
        self._without_passes = StepsWithoutPasses(training)

    @property
    def fault_tolerant(self) -> bool:
        """Whether training goes on after a lost rank."""
        return self._failures.recovery is not None

    @property
    def is_joining(self) -> bool:
        """Whether ranks train on different numbers of batches now."""
        return self.joining is not None

    @property
    def gradients_wait(self) -> bool:
        """Whether there are gradients of this step, and no optimizer has stepped yet that may apply them.

        Those that are not finite are of a step that is skipped, and a module that has had passes whose gradients were
        thrown away may just have had another one.
        """
        passed = self._passed or (self.forward_told and self._reducer.accumulated)
        if not passed or self.stepped or not self._optimizers.alive or self._discarded.seen:
            return False
        return holds_gradients(list(self._inventory.trainable.values()), finite=True)

    def announce(self, moment: Moment) -> int:
        """Within a join: before something that all ranks do together; returns the first rank that has inputs."""
        return self.joining.announce(moment, self._team.size) if self.joining is not None else 0

    # -- moments, called by the hooks ----------------------------------------------------------------------------

    def is_of_training(self, *, gradients: bool) -> bool:
        """Whether a forward pass in training mode that is about to begin is one of the training.

        One without gradients in another thread, which samples or evaluates, begins and ends nothing.

        Args:
            gradients: they are enabled.

        Raises:
            RuntimeError: they are, and another thread is in a backward pass.
        """
        if torch._C._current_graph_task_id() != -1:  # recomputes activations, maybe in a thread of autograd's
            return True
        if gradients:
            self._refuse_beside("a forward pass with gradients in thread")
            self.thread = threading.get_ident()
            return True
        return self.thread == threading.get_ident() and not self._reducer.runs_elsewhere

    def _refuse_beside(self, call_in_thread: str) -> None:
        """Refuse what would disturb a backward pass that another thread is in.

        Raises:
            RuntimeError: one is.
        """
        reducer = self._reducer
        if reducer.runs_elsewhere and reducer.stays_elsewhere():
            names = {each.ident: f"thread {each.name!r}" for each in threading.enumerate()}
            raise RuntimeError(
                f"{call_in_thread} {threading.current_thread().name!r}, while a backward pass of the same module runs "
                f"in {names.get(reducer.thread, 'another thread')}; beside a backward pass, other threads may only "
                "make forward passes under torch.no_grad() or torch.inference_mode()"
            )

    def forward_begins(self, *, gradients: bool = True) -> None:
        """Before a forward pass in training mode, or a backward pass without one.

        Args:
            gradients: they are enabled. Without them one rank may make a pass alone, so nothing is exchanged.
        """
        state = self._state
        refuse_capture(self._inventory.device)
        if (self._reducer.open or self._reducer.failed_to_end) and torch._C._current_graph_task_id() == -1:
            self.end_backward()  # its end went unnoticed, or an exception broke it off
        inside = self.nesting.inside  # of an optimizer's step, which evaluates a closure
        if self.stepped and not inside:
            self.end_step()  # not all optimizers made a step
        self._inventory.check_frozen()
        for bucket in state.buckets:
            bucket.check_home(state.step, state.algorithm.payload)
        if not state.buckets:
            self._inventory.check_kinds()
        if not self.forward_seen:
            self.forward_seen = True
            if self._binding.tuning is not None:
                self._binding.tuning.step_begins()
            if self.chooser is not None:
                self.chooser.step_begins()
        if gradients and not self.forward_told:
            self.forward_told = True
            if self.joining is not None and (self.joining.early or _acts_on_forward(state.algorithm)):
                self.announce(Moment.FORWARD)
            if self._exchanges and not self.step_begun and not self._failures.step_is_lost:
                if _acts_on_forward(state.algorithm):
                    self._first_weights.begin()
                state.algorithm.on_forward(self._ctx)

    def is_to_broadcast_buffers(self) -> bool:
        """Whether a forward pass begins with rank 0's buffers; of those that an optimizer makes, the first.

        As under DDP, the first one after each that is to be synchronised: ranks that synchronise as often broadcast
        as often, whatever passes they make between.
        """
        if not self.broadcasts_buffers:
            return False
        if self._buffers_told and self.nesting.inside:
            return False  # ranks may search for differently long
        due, self.buffers_due = self.buffers_due, torch.is_grad_enabled() and self._reducer.is_to_sync()
        self._buffers_told |= due
        return due

    def end_backward(self) -> None:
        """Close the backward pass if one is open: its end went unnoticed, or an exception interrupted it.

        Raises:
            CommunicationError: it was interrupted on some ranks only.
            RuntimeError: it goes on in another thread.
        """
        self._refuse_beside("the end of a backward pass or a step in thread")
        if self._reducer.broken_off:
            self._failures.settle_broken()
        elif self._reducer.open:
            self._reducer.end()

    def shadow_backward(self) -> None:
        """Take part in a backward pass of other ranks, with zero gradients."""
        if self._state.algorithm.payload is Payload.GRAD and not self._shadowed:
            for param in self._inventory.parameters.values():
                param.grad = None  # of this rank's own last step
        self._shadowed = True
        self._reducer.shadow()

    def step_begins(self) -> None:
        """Before an optimizer changes weights."""
        self.end_backward()
        if not self.step_begun and not self._may_step():
            self._drop_gradients()
        if self._failures.step_is_lost:
            self.step_begun = True  # the optimizers find no gradients
            return
        if self._failures.final and self._state.algorithm.payload is Payload.GRAD:
            self._failures.check_alive()  # the gradients are not the mean of all ranks'
        own, algorithm = self._inventory.trains_its_own, self._state.algorithm
        scale = scale_of_step()
        if scale is not None or not self.step_begun:  # else the scaler of another optimizer made this step
            self.units.follow(scale)
        for each in (algorithm, *self._state.schedule.values()):  # not after a warm-up of hours
            refuse_plain_scaler(each, self._optimizers.alive, self._team.size, own, self.fault_tolerant)
        if not self.step_begun:
            self.step_begun = True
            if self.chooser is not None and not self.chooser.settled:
                self.chooser.optimizer_begins(steps_by_plain_scaler())
            if self._exchanges:
                self._unless_outlived(partial(self._state.algorithm.on_step_begin, self._ctx))

    def end_step(self) -> None:
        """After the step of the last optimizer. With `fault_tolerant` another engine may have taken over then."""
        state, recovery = self._state, self._failures.recovery
        if recovery is not None and not recovery.step_ended():
            self._optimizers.uncount(self.stepped)
            if state.buckets:
                state.algorithm.on_lost_step(self._ctx)
            self.stepped.clear()
            self._forget_step()
            return
        self.announce(Moment.STEP)
        if self._passed:
            self._without_passes.step_had_pass()
        elif self._reducer.is_to_sync() and not self._failures.trains_alone:
            by_forward = _acts_on_forward(state.algorithm)
            self._without_passes.step_had_none(averages_weights=self.forward_told or not by_forward)
        self.stepped.clear()
        if not self.exchange_and_count():
            assert recovery is not None
            recovery.recover()

    def exchange_and_count(self) -> bool:
        """Make the exchange with which a step ends, and count the step. False: repeat it in other groups."""
        state, binding, algorithm = self._state, self._binding, self._state.algorithm
        if self._exchanges:
            self.ending = True
            try:
                if not self.step_begun:  # there is no optimizer, or it is others' step
                    algorithm.on_step_begin(self._ctx)
                algorithm.on_step_end(self._ctx)
                if (fallback := self._quality.find_fallback()) is not None:
                    self.hand_over(fallback)
            except CommunicationError as error:
                if self._failures.repeats_exchange(error):
                    return False
                self.ending = False
                if not self._failures.outlives_exchange(error):
                    raise
            except BaseException:
                self.ending = False
                raise
            self.ending = False
        state.step += 1
        self._forget_step()
        if state.step in state.schedule:
            self._unless_outlived(partial(self.hand_over, state.schedule.pop(state.step)))
        self._tally.step_ended()
        if binding.tuning is not None:
            binding.tuning.step_ended(binding)
        if self.chooser is not None:
            self.chooser.step_ended(self._choices(self))
        for listener in self.listeners.active:
            listener.step_ended(state.step)
        return True

    def go_on_ending(self) -> None:
        """This engine takes over from another one whose step has not ended; `exchange_and_count` ends it."""
        self.ending = self.step_begun = True

    def go_on_within(self, stepped: Sequence[int]) -> None:
        """Go on with a step that these optimizers have made; none of them: between two steps.

        Where one optimizer steps less often than another, the end of a step is noticed at the next forward pass only.
        """
        self.stepped, self._first_weights.settled = set(stepped), bool(stepped)
        self.step_begun = self.forward_seen = self.forward_told = bool(stepped)
        self._discarded.state_is_loaded()

    # -- moments, called by the reducer --------------------------------------------------------------------------

    def pass_begins(self) -> None:
        """A synchronised backward pass begins."""
        refuse_capture(self._inventory.device)
        # In evaluation mode, or of another method, or torch.compile took the hooks into its graph, as nothing.
        if not self.forward_told:
            if self.broadcasts_buffers and not self.hooks_ran:
                raise RuntimeError(
                    "broadcast_buffers=True: the module's hooks, which broadcast before a forward pass, did not run: "
                    "another method than forward() was called (call the module itself), or the forward pass was "
                    "compiled together with the hooks, which then do nothing (distribute what torch.compile() returns, "
                    "or compile parts of the module)"
                )
            self.forward_begins()
        if self._watch.pass_begins() and not self.nesting.inside:
            look_for_steps(self._watch, self._state)
        tell_of_loaded_weights(self._state)
        adds = False
        if self._passed:
            algorithm, params = self._state.algorithm, list(self._inventory.trainable.values())
            matters = self._memory.keeps_state or not algorithm.scales_with_loss
            adds = holds_gradients(params, self._reducer.first, read=matters)
            if adds:
                refuse_second_pass(algorithm)
            else:
                self._discarded.was_discarded()
        self.units.pass_begins()  # what was put back is in the units of the pass before
        if not adds:
            self._discarded.pass_begins()
        if self.chooser is not None:
            self.chooser.backward_begins()
        self.announce(Moment.BACKWARD)

    def order_learned(self, seen: list[int]) -> None:
        """End of the first pass: agree on rank 0's order and make the buckets."""
        order = seen + [index for index in reversed(range(len(self._names))) if index not in set(seen)]
        names = encode([self._names[index] for index in order]) if self._team.rank == 0 else b"-"
        what, key = "agreement on the order of gradients", f"order/{self._key}"
        self._state.order = decode(self._team.all_gather_bytes_once(what, key, names, self._failures.check_members)[0])
        self._binding.start()

    def bucket_ready(self, bucket: Bucket) -> None:
        """All gradients of `bucket` are in place."""
        if self._failures.step_is_lost:
            return
        self._state.algorithm.on_ready(self._ctx, bucket)

    def buckets_done(self) -> None:
        """Every bucket has been ready."""
        state, scale = self._state, 1.0 if self.joining is None else self.joining.scale
        if self._failures.trains_alone:
            return
        self._dispatcher.check_alive()
        if not _acts_on_forward(state.algorithm):
            self._first_weights.begin()
        if self._inventory.sparse and self._team.size > 1:
            with self._dispatcher.side_exchange("sparse gradients") as group:
                exchange_sparse(self._inventory.sparse, group, getattr(state.algorithm, "average", True))
        state.algorithm.on_backward_end(self._ctx)
        if scale != 1.0:
            for bucket in state.buckets:
                bucket.flat.mul_(scale)
            for param in self._inventory.sparse.values():
                if param.grad is not None:
                    param.grad.mul_(scale)
        self._passed = True
        if not self._optimizers.refs:
            tell_of_copied_weights(state, self._team.size)
            self.end_step()

    def params_missing(self, indices: Sequence[int]) -> None:
        """This rank did not use these parameters; their buckets are about to be launched."""
        names = {self._names[index] for index in indices}
        self._withheld.hold(self._memory, self._dispatcher, self._pool.groups, self._state.buckets, names)

    def params_unused(self, indices: Sequence[int]) -> None:
        """No rank used these parameters, and their buckets have been exchanged."""
        self._withheld.put_back(self._names[index] for index in indices)

    def finish_exchanges(self, *, on_host: bool = True) -> None:
        """Return when all exchanges are over."""
        self._dispatcher.wait()
        if on_host and isinstance(self._pool.shared[0], StreamLane):  # over, not only enqueued
            torch.cuda.current_stream(self._inventory.device).synchronize()

    def pass_lost(self, error: CommunicationError) -> bool:
        """What ranks do together has failed."""
        if not self._failures.lose_step(error):
            return False
        if self._failures.step_is_lost:
            self._drop_gradients()
        if not self._optimizers.refs:
            self.end_step()
        return True

    def pass_broke_off(self) -> None:
        """An exception interrupted the pass."""
        self._failures.pass_broke_off()

    # ------------------------------------------------------------------------------------------------------------

    @property
    def _exchanges(self) -> bool:
        """Whether the algorithm is to act."""
        return bool(self._state.buckets) and not self._failures.trains_alone

    def _unless_outlived(self, act: Callable[[], None]) -> None:
        """Act. If an exchange fails, the step, which counts already, goes on without, where that is possible."""
        try:
            act()
        except CommunicationError as error:
            if not self._failures.outlives_exchange(error):
                raise

    def _forget_step(self) -> None:
        self._watch.step_ends()
        self.forward_seen = self.forward_told = self.step_begun = self.hooks_ran = False
        self._shadowed = self._buffers_told = self._passed = False
        self._discarded.step_ends()

    def _may_step(self) -> bool:
        """Whether the optimizers may step, with gradients that are this rank's own, or whose mean counts."""
        recovery, algorithm = self._failures.recovery, self._state.algorithm
        if recovery is None:
            return True
        if self._state.lost_step is LostStep.FREE:
            return True
        if self._failures.keeps_step:
            return self._failures.may_step_alone()
        if self._state.lost_step is LostStep.REPEAT and not algorithm.averages_gradients(self._optimizers.alive):
            return not recovery.lost
        return recovery.may_apply(recovery.round)

    def _drop_gradients(self) -> None:
        """Leave nothing to step with: torch's optimizers pass over parameters without a gradient."""
        for param in self._inventory.parameters.values():
            param.grad = None

    def hand_over(self, algorithm: Algorithm) -> None:
        """Between steps: make replicas equal and train with `algorithm` from now on. Collective."""
        self._replicas.equalise_for(algorithm)
        self._binding.bind(algorithm)


def _acts_on_forward(algorithm: Algorithm) -> bool:
    return type(algorithm).on_forward is not Algorithm.on_forward

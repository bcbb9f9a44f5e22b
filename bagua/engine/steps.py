"""What happens at each moment of a training step, in the training thread."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

from bagua.algorithms.base import Algorithm, Exactness, Payload
from bagua.comm.groups import Groups
from bagua.comm.team import decode, encode
from bagua.engine.bucket import Bucket
from bagua.engine.graph_task import refuse_capture
from bagua.engine.lane import InlineLane, Lane, StreamLane
from bagua.engine.launcher import Launcher
from bagua.engine.moment import Moment
from bagua.engine.skipping import refuse_plain_scaler
from bagua.engine.sparse import exchange_sparse
from bagua.engine.tuning import Tuning

__all__ = ["Announcer", "Steps"]


class Announcer(Protocol):
    """How an engine tells ranks that have run out of inputs what comes; see `joining`."""

    scale: float

    @property
    def early(self) -> bool:
        """Whether every forward pass is to be announced."""
        ...

    def announce(self, moment: Moment, size: int) -> int:
        """Before something that all ranks do together; returns the first rank that has inputs."""
        ...


class Steps(Launcher):
    """The part of an engine that follows a training step and tells the algorithm."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.broadcasts_buffers = False
        self.hooks_ran = False  # those of the module's forward pass, in this step
        self.joining: Announcer | None = None
        self.tuning: Tuning | None = None
        self._names = list(self.inventory.trainable)
        self._schedule: dict[int, Algorithm] = {}
        self._order: list[str] | None = None
        self._stepped: set[int] = set()
        self._forward_seen = False  # in this step
        self._step_begun = False  # by the first optimizer
        self._shadowed = False  # a backward pass of others, in this step
        self._warned = False  # of quality, if nothing takes over
        self._side: Lane | None = None
        self._vetted: Algorithm | None = None  # the one under which a step was seen to be made without torch's scaler

    # -- what the training thread says itself --------------------------------------------------------------------

    @property
    def side_groups(self) -> Groups:
        """Groups for collectives of the training thread; opened when first used, so by all ranks at once."""
        self._check_alive()
        if self._side is None:
            self._side = InlineLane(self._open_groups())
        return self._side.groups

    @property
    def all_lanes(self) -> Sequence[Lane]:
        """Those of the launcher, and the side lane."""
        return super().all_lanes if self._side is None else (*super().all_lanes, self._side)

    @property
    def hand_overs(self) -> list[int]:
        """Steps after which another algorithm takes over."""
        return sorted(self._schedule)

    def announce(self, moment: Moment) -> int:
        """Within a join: before something that all ranks do together; returns the first rank that has inputs."""
        return self.joining.announce(moment, self.team.size) if self.joining is not None else 0

    # -- moments, called by the hooks ----------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Before a forward pass in training mode, or a backward pass without one."""
        refuse_capture(self.inventory.device)
        if self.backward.open and torch._C._current_graph_task_id() == -1:
            self.end_backward()  # the last backward pass was broken off by an exception
        if self._stepped:
            self.end_step()  # not all optimizers made a step
        self.inventory.check_frozen()
        for bucket in self.buckets:
            bucket.check_home(self.step, self.algorithm.payload)
        if not self.buckets:
            self.inventory.check_kinds()
        if not self._forward_seen:
            self._forward_seen = True
            if self.tuning is not None:
                self.tuning.step_begins()
            if self.joining is not None and (self.joining.early or _acts_on_forward(self.algorithm)):
                self.announce(Moment.FORWARD)
            if self.buckets:
                self.algorithm.on_forward(self)

    def _on_begin(self) -> None:
        """A synchronised backward pass begins."""
        refuse_capture(self.inventory.device)
        if not self._forward_seen:  # in evaluation mode, or torch.compile took the hooks into its graph, as nothing
            if self.broadcasts_buffers and not self.hooks_ran:
                raise RuntimeError(
                    "broadcast_buffers=True: the forward pass was compiled together with the module's hooks, which "
                    "then do nothing; distribute what torch.compile() returns, or compile parts of the module"
                )
            self.forward_begins()
        self.announce(Moment.BACKWARD)

    def end_backward(self) -> None:
        """Close the backward pass if one is open: its end went unnoticed, or an exception broke it off."""
        if self.backward.open:
            self.backward.end()

    def shadow_backward(self) -> None:
        """Take part in a backward pass of others, with gradients of zero."""
        if self.algorithm.payload is Payload.GRAD and not self._shadowed:
            for param in self.inventory.parameters.values():
                param.grad = None  # of this rank's own last step
        self._shadowed = True
        self.backward.shadow()

    def step_begins(self) -> None:
        """Before each optimizer's step."""
        self.end_backward()
        if not self._step_begun:
            self._step_begun = True
            if self._vetted is not self.algorithm:
                self._vetted = self.algorithm
                refuse_plain_scaler(self)
            if self.buckets:
                self.algorithm.on_step_begin(self)

    def optimizer_stepped(self, number: int) -> None:
        """After a step of optimizer `number`."""
        self._stepped.add(number)
        if len(self._stepped) >= len(self.optimizers):
            self.end_step()

    def end_step(self) -> None:
        """After the step of the last optimizer."""
        self.announce(Moment.STEP)
        self._stepped.clear()
        if self.buckets:
            if not self._step_begun:  # there is no optimizer, or it is others' step
                self.algorithm.on_step_begin(self)
            self.algorithm.on_step_end(self)
            self._check_quality()
        self.step += 1
        self._forward_seen = self._step_begun = self._shadowed = self.hooks_ran = False
        if self.step in self._schedule:
            self.algorithm.on_pause(self)
            self._average_weights()  # what takes over starts from equal replicas, and no rank's work is lost
            self.bind(self._schedule.pop(self.step))
        self._tally.step_ended()
        if self.tuning is not None:
            self._tune(self.tuning)

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
        if self.inventory.sparse and self.team.size > 1:
            exchange_sparse(self.inventory.sparse, self.side_groups.world, getattr(self.algorithm, "average", True))
        self.algorithm.on_backward_end(self)
        if self.joining is not None and self.joining.scale != 1.0:
            for bucket in self.buckets:
                bucket.flat.mul_(self.joining.scale)
            for param in self.inventory.sparse.values():
                if param.grad is not None:
                    param.grad.mul_(self.joining.scale)
        if not self._optimizers:
            self.end_step()

    def _finish(self) -> None:
        self.wait()
        if isinstance(self.lanes[0], StreamLane):  # over, not only enqueued
            torch.cuda.current_stream(self.inventory.device).synchronize()

    # -- what these need of the rest of the engine ---------------------------------------------------------------

    @property
    @abstractmethod
    def paused(self) -> bool:
        """Whether the user wants nothing to begin in the background."""

    @abstractmethod
    def at(self, step: int, algorithm: Algorithm) -> None:
        """Schedule a hand-over."""

    @abstractmethod
    def bind(self, algorithm: Algorithm) -> None:
        """Hand over now."""

    @abstractmethod
    def _tune(self, tuning: Tuning) -> None:
        """Let `tuning` change how the next step exchanges."""

    @abstractmethod
    def _start(self) -> None:
        """Make buckets if their order is known or does not matter."""

    @abstractmethod
    def _average_weights(self) -> None:
        """Make the replicas' weights equal to their mean."""


def _acts_on_forward(algorithm: Algorithm) -> bool:
    return type(algorithm).on_forward is not Algorithm.on_forward

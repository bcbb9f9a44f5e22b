"""`Following`: what `State` does for a fault-tolerant module, whose weights live on in the ranks that are left."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from bagua.checkpoint.items import Item, kind_of
from bagua.elastic.commit import pack, unpack
from bagua.elastic.resize import Resize
from bagua.engine.recovery.step_gate import StepGate
from bagua.errors import CommunicationError
from bagua.sampling import Resumable

__all__ = ["Following", "Place"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Place:
    """How far a training loop is, after the last step that counts.

    Attributes:
        number: of the last commit.
        size: number of ranks.
        epoch: of the sampler; 0 without one.
        objects: plain data, and `state_dict` of what has one, by name; "sampler" too.
        groups: hyperparameters of the optimizer, which schedulers change.
    """

    number: int
    size: int
    epoch: int
    objects: dict[str, Any]
    groups: list[dict[str, Any]]

    def to_bytes(self) -> bytes:
        """For other ranks."""
        return pack(Item("data", vars(self)))

    @classmethod
    def of(cls, report: bytes) -> Place:
        """The inverse of `to_bytes`.

        Raises:
            CheckpointError: it holds something that is neither a tensor nor plain data.
        """
        return cls(**unpack(report, "progress of the training loop"))


class Following:
    """Keeps the place of a loop in the data together with the weights that the ranks hold.

    A step begins before its batch is chosen. If the members have changed, they open new groups then, and divide the
    rest of the epoch among them. So a step is applied by the ranks among which its samples were divided. If it is lost,
    the loop goes back to where it was before, and the same samples are divided among the ranks that are left.

    Args:
        module: fault-tolerant.
        optimizer: its hyperparameters go back with the loop; its state is the engine's business.
        sampler: elastic, or anything with `state_dict`; or None.
        user: by name, schedulers and plain data. Plain data is read and replaced in place.
        on_resize: called where the loop goes on, if the number of ranks has changed.

    Attributes:
        number: of the last commit.
        rank, size: of the ranks among which the samples of the step in progress are divided.
        tracking: whether `track` is in progress.

    Raises:
        TypeError: an object cannot go back; names it.
        CheckpointError: an object holds something that is neither a tensor nor plain data.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: Any,
        user: dict[str, Any],
        on_resize: Callable[[Resize], None] | None,
    ) -> None:
        for name, value in user.items():
            if kind_of(value) in ("module", "optimizer"):
                raise TypeError(
                    f"{name}: {type(value).__name__} is not kept equal by a fault-tolerant module; State takes "
                    "schedulers, counters and plain data with it"
                )
        self._gate = gate = StepGate(module)
        self.rank, self.size = gate.rank, gate.size
        self._optimizer, self._sampler, self._user, self._on_resize = optimizer, sampler, user, on_resize
        self.number = 0
        self.tracking = False
        self._place = self._take()
        Place.of(self._place.to_bytes())
        self._attempts = self._steps = self._deal = 0
        if gate.progress.received is None:
            gate.progress.divisions.clear()
        gate.progress.tell = self._tell
        if hasattr(sampler, "follow"):
            sampler.follow(self)

    def restore(self) -> Place | None:
        """On a rank that has joined a running job: go to the place of the others. Returns it; None on a founder."""
        report = self._gate.progress.received
        if report is None:
            return None
        place = Place.of(report)
        self._adopt(place)
        self._divide()
        return place

    def track(self, loader: Iterable[_T], items_per_batch: int) -> Iterator[_T]:
        """The batches of `loader` until the epoch is over, which is divided anew when the members change.

        Raises:
            CommunicationError: training cannot go on.
            RuntimeError: the epoch is over already.
        """
        self.tracking = True
        try:
            yield from self._track(self._sampler, loader, items_per_batch)
        finally:
            self.tracking = False

    def _track(self, sampler: Resumable[Any, Any], loader: Iterable[_T], items_per_batch: int) -> Iterator[_T]:
        batches: Iterator[_T] | None = None
        given = total = deal = 0
        fresh = True
        while True:
            inside = self._gate.settle()  # gradients are accumulated
            if not inside:
                self._look_back()
            if fresh and sampler.over:
                raise RuntimeError(f"sampler: epoch {sampler.epoch} is over; call sampler.set_epoch() for the next one")
            fresh = False
            if batches is None or deal != self._deal:
                sampler.go_on()
                batches, total = None, len(sampler)
            if total == 0 or (batches is not None and given * items_per_batch >= total):
                return
            if not inside and not self._begin():
                return
            if batches is None or deal != self._deal:
                # A loader with workers has asked for batches of the former members: they are dropped. It asks for some
                # of the new ones at once, which makes the rest of the epoch look shorter.
                sampler.go_on()
                total = len(sampler)
                batches, given, deal = iter(loader), 0, self._deal
            try:
                batch = next(batches)
            except StopIteration:
                return
            given += 1
            sampler.used(min(given * items_per_batch, total))
            yield batch

    def _look_back(self) -> None:
        """Between two steps: go back if the one before was lost; else remember where the loop is."""
        gate = self._gate
        lost = gate.attempts != self._attempts and gate.steps == self._steps
        self._attempts, self._steps = gate.attempts, gate.steps
        if lost and self._place.epoch == self._epoch:
            self._put_back(self._place)
        else:
            self._place = self._take()

    def _begin(self) -> bool:
        """Begin a step. Returns False if the job is in a later epoch than this rank's loop."""
        if not self._reach():
            return False
        self._gate.begin()
        self._attempts, self._steps = self._gate.attempts, self._gate.steps
        if not self._reach():
            return False
        self._divide()
        return True

    def _divide(self) -> None:
        """Divide the rest of the epoch among the ranks that train now, once this one is as far as the others were."""
        divisions, old = self._gate.progress.divisions, self.size
        while divisions and divisions[0].step <= self._gate.steps:
            now = divisions.pop(0)
            self.rank, self.size = now.rank, now.size
            self._deal += 1
        self._resize(old)

    def _reach(self) -> bool:
        """Take over the place of the job, if this rank was behind. Returns False if its loop is in an earlier epoch.

        The loop then has to end its epoch, and others, until it gets there.
        """
        report = self._gate.progress.received
        if report is None:
            return True
        place = Place.of(report)
        if place.epoch < self._epoch:
            raise CommunicationError(
                f"this rank is in epoch {self._epoch} and the job in epoch {place.epoch}: what it has trained "
                "since does not count; it has to be started again"
            )
        if place.epoch > self._epoch:
            return False
        self._adopt(place)
        return True

    def _adopt(self, place: Place) -> None:
        self._gate.progress.received = None
        self._attempts, self._steps = self._gate.attempts, self._gate.steps
        self._place, self.size = place, place.size
        self._put_back(place)

    def _resize(self, old: int) -> None:
        """Tell the user if the ranks are more or fewer than before."""
        if old != self.size:
            if self._on_resize is not None:
                self._on_resize(Resize(old, self.size))
            self._place = self._take()

    @property
    def _epoch(self) -> int:
        return int(getattr(self._sampler, "epoch", 0))

    def _tell(self) -> bytes:
        """For ranks that lack it. Without `track` there is nothing to go back to, and a step that ends counts."""
        back = self._gate.progress.repeats and not self._gate.ending
        return (self._place if back else self._take()).to_bytes()

    def _objects(self) -> dict[str, Any]:
        return dict(self._user) if self._sampler is None else {**self._user, "sampler": self._sampler}

    def _take(self) -> Place:
        objects = {
            name: value if kind_of(value) == "data" else value.state_dict() for name, value in self._objects().items()
        }
        groups = [{key: each for key, each in g.items() if key != "params"} for g in self._optimizer.param_groups]
        return Place(self.number, self.size, self._epoch, copy.deepcopy(objects), copy.deepcopy(groups))

    def _put_back(self, place: Place) -> None:
        self.number = place.number
        objects = copy.deepcopy(place.objects)
        for name, value in self._objects().items():
            if kind_of(value) == "data":
                self._user[name] = objects[name]
            else:
                value.load_state_dict(objects[name])
        for group, saved in zip(self._optimizer.param_groups, copy.deepcopy(place.groups), strict=True):
            for key, value in saved.items():
                if isinstance(group[key], torch.Tensor):
                    group[key].copy_(value)
                elif group[key] != value:
                    group[key] = value
        self._deal += 1

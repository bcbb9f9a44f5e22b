"""Discrete-event simulation of tasks that share resources: links, CPU cores and lanes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["DELAY", "Lanes", "Resource", "Simulation", "Task"]

_EPSILON = 1e-12  # of a task's amount, relative: what rounding leaves over is nothing


@dataclass(frozen=True, eq=False)
class Resource:
    """Shared evenly by the tasks that use it at a time, or used by one after the other.

    Attributes:
        name: for error messages.
        capacity: units per second for all tasks together.
        each: units per second that one task can use at most.
        in_turn: the task that began first uses all of it, the others wait. So tasks that began together do not end
            together and then leave it idle together.
    """

    name: str
    capacity: float = math.inf
    each: float = math.inf
    in_turn: bool = False


DELAY = Resource("delay", each=1.0)  # a task's amount is its time in seconds, whatever else runs


@dataclass(eq=False)
class Lanes:
    """At most `count` chains of tasks at a time; a chain waits for a lane in the order of its request.

    Attributes:
        count: of lanes.
    """

    count: int
    free: int = field(init=False)
    waiting: list[Task] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count: expected at least 1 lane, got {self.count}")
        self.free = self.count


@dataclass(eq=False)
class Task:
    """An amount of work on one resource, begun when the tasks before it have ended.

    Attributes:
        resource: that it uses.
        amount: of the resource's units.
        name: for traces.
        begin, end: in seconds, once simulated; infinite before.
    """

    resource: Resource
    amount: float
    name: str = ""
    begin: float = math.inf
    end: float = math.inf
    takes: Lanes | None = None
    frees: Lanes | None = None
    left: float = field(init=False)
    blockers: int = field(init=False, default=0)
    followers: list[Task] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.amount) and self.amount >= 0):
            raise ValueError(f"amount of task {self.name!r}: expected a finite number >= 0, got {self.amount}")
        self.left = self.amount


class Simulation:
    """Tasks and their order. Deterministic: equal tasks give equal times.

    Examples:
        >>> from bagua.plan.events import Resource, Simulation
        >>> simulation = Simulation()
        >>> link = Resource("link", capacity=10.0)
        >>> one, two = simulation.add(link, 10.0), simulation.add(link, 20.0)
        >>> simulation.run(), one.end
        (3.0, 2.0)
    """

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def add(
        self,
        resource: Resource,
        amount: float,
        after: Sequence[Task] = (),
        name: str = "",
        takes: Lanes | None = None,
        frees: Lanes | None = None,
    ) -> Task:
        """Add a task.

        Args:
            after: tasks that must have ended.
            takes: waits for a lane before it begins, and holds it until a task that `frees` the lanes ends.

        Raises:
            ValueError: `amount` is negative or not finite.
        """
        task = Task(resource, amount, name, takes=takes, frees=frees)
        for before in after:
            before.followers.append(task)
            task.blockers += 1
        self._tasks.append(task)
        return task

    def run(self) -> float:
        """Return when the last task ends, in seconds.

        Raises:
            ValueError: tasks wait for one another in a circle, or for a lane that nobody frees.
        """
        now, ended, active = 0.0, 0, []
        for task in self._tasks:
            if task.blockers == 0:
                _start(task, now, active)
        while active:
            rates = _rates(active)
            wait = min(_seconds_left(task, rate) for task, rate in zip(active, rates, strict=True))
            now += wait
            done: list[Task] = []
            still: list[Task] = []
            for task, rate in zip(active, rates, strict=True):
                task.left = 0.0 if task.left == 0 or math.isinf(rate) else task.left - rate * wait
                (done if task.left <= _EPSILON * task.amount else still).append(task)
            active = still
            for task in done:
                task.end = now
                ended += 1
                if task.frees is not None:
                    task.frees.free += 1
                    if task.frees.waiting:
                        _start(task.frees.waiting.pop(0), now, active)
                for follower in task.followers:
                    follower.blockers -= 1
                    if follower.blockers == 0:
                        _start(follower, now, active)
        if ended < len(self._tasks):
            names = [task.name or task.resource.name for task in self._tasks if math.isinf(task.end)]
            raise ValueError(f"tasks that never begin: {', '.join(names[:5])}")
        return now


def _start(task: Task, now: float, active: list[Task]) -> None:
    if task.takes is not None:
        if task.takes.free == 0:
            task.takes.waiting.append(task)
            return
        task.takes.free -= 1
    task.begin = now
    active.append(task)


def _seconds_left(task: Task, rate: float) -> float:
    if task.left == 0:
        return 0.0
    return task.left / rate if rate else math.inf


def _rates(active: Sequence[Task]) -> list[float]:
    """Units per second of each task. `active` is in the order in which they began."""
    users: dict[Resource, int] = {}
    for task in active:
        users[task.resource] = users.get(task.resource, 0) + 1
    rates: list[float] = []
    served: set[Resource] = set()
    for task in active:
        resource = task.resource
        if not resource.in_turn:
            rates.append(min(resource.each, resource.capacity / users[resource]))
        else:
            rates.append(0.0 if resource in served else min(resource.each, resource.capacity))
            served.add(resource)
    return rates

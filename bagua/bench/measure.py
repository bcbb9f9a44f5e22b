"""One contender on one rank: warm up, agree on a number of steps, run them against the clock."""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch.distributed as dist

import bagua
from bagua.bench import counters, models
from bagua.bench.compute import Compute, EmulatedModel
from bagua.bench.contenders import Contender
from bagua.bench.training import Parts, Training

__all__ = ["Job", "Measured", "measure"]

_WARMUP_SPEED = 0.05  # of the compute time, while nothing is measured
_PROFILED = 2  # steps


@dataclass(frozen=True)
class Job:
    """What all workers are told.

    Attributes:
        model: a name of `models`.
        compute_ms, forward_share: see `Compute`.
        steps: most steps that are timed.
        budget_s: fewer are, down to 2 (or a whole period), if they would take longer.
        round_s: of contenders that average in the background, at least so long is measured.
        emulated: optimizers of the Adam kind do the arithmetic of SGD.
        timeout_s: of collectives.
        cases: number and name of each contender, to be run in this order.
        switches: somebody changes the link: for the warm-up, and back.
        profile: name of the contender of which a timeline is kept; empty for none.
    """

    kind: ClassVar[str] = "training"

    model: str
    compute_ms: float
    forward_share: float
    steps: int
    budget_s: float
    round_s: float
    emulated: bool
    timeout_s: float
    cases: tuple[tuple[int, str], ...]
    switches: bool
    profile: str = ""


@dataclass(frozen=True)
class Measured:
    """What one rank saw; seconds.

    Attributes:
        steps: of each, in order.
        forward_s, backward_s, optimizer_s: medians.
        wall_s, cpu_s: of all steps; CPU time is that of all threads of the rank.
        waited_s: in which threads of the rank were ready to run and had no core, all threads together.
        busy: share of all cores of the machine that were busy in that time.
        stolen: share of them that the host of a virtual machine gave to others.
        sent_bytes: that left the host's network device per step; None without a device of its own.
        counted_bytes: the same by the library's own count; None if it has none.
        peak_bytes: the most that the process had in RAM, less what it had before the model was made. In a process
            that ran another contender before, part of it is memory that was freed and used again.
    """

    steps: tuple[float, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float
    wall_s: float
    cpu_s: float
    waited_s: float
    busy: float
    stolen: float
    sent_bytes: float | None
    counted_bytes: float | None
    extra: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(
    contender: Contender, job: Job, control: dist.ProcessGroup, switch: Callable[[str], None], trace: str = ""
) -> Measured:
    """Run `contender`; a collective of all ranks.

    Args:
        control: a group for what the ranks agree on.
        switch: called with "setup", "distribute" and "measure", when the link may be changed; returns when it has been.
        trace: file for a timeline, on one rank, of two more steps of the contender that `job` wants one of.
    """
    rank = dist.get_rank()
    switch("setup")
    gc.collect()
    counters.forget_peak()
    resident = counters.resident_bytes()
    compute = Compute(job.compute_ms / 1000, job.forward_share)
    model = EmulatedModel(models.get(job.model), compute, seed=rank)
    dist.barrier(control)
    switch("distribute")
    training = contender.prepare(model, job.emulated)
    dist.barrier(control)
    switch("setup")
    model.clock.scale = _WARMUP_SPEED
    for _ in range(contender.warmup_steps):
        training.step()
    dist.barrier(control)
    switch("measure")
    model.clock.scale = 1.0
    num_steps = _agree_on_steps(contender, job, control, training)
    dist.barrier(control)
    measured = _timed(training, model, num_steps, contender.family == "bagua")
    measured = replace(measured, peak_bytes=counters.peak_bytes() - resident)
    if job.profile == contender.name:
        _profile(training, trace)
    dist.barrier(control)
    switch("setup")
    training.close()
    return measured


def _agree_on_steps(contender: Contender, job: Job, control: dist.ProcessGroup, training: Training) -> int:
    """Steps to be timed: whole periods, as many as the budget allows. One step is made to see, where it may be."""
    if contender.period > 1:
        return contender.period
    step_s = training.step().step_s  # connections learn the link, too
    everyone: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(everyone, step_s, control)
    slowest = max(everyone)
    least = math.ceil(job.round_s / min(everyone)) if contender.averaged else 2
    return max(min(job.steps, int(job.budget_s / slowest)), least, 2)


def _timed(training: Training, model: EmulatedModel, num_steps: int, ours: bool) -> Measured:
    interface = os.environ.get("BAGUA_BENCH_INTERFACE", "")
    gc.collect()
    gc.disable()
    try:
        sent, mine = counters.sent_bytes(interface), _counted(model) if ours else 0
        busy, waited = counters.busy(), counters.waited_s()
        cpu, wall = time.process_time(), time.perf_counter()
        parts: list[Parts] = [training.step() for _ in range(num_steps)]
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        now, waited = counters.busy(), counters.waited_s() - waited
        after, ours_after = counters.sent_bytes(interface), _counted(model) if ours else 0
    finally:
        gc.enable()
    return Measured(
        steps=tuple(each.step_s for each in parts),
        forward_s=statistics.median(each.forward_s for each in parts),
        backward_s=statistics.median(each.backward_s for each in parts),
        optimizer_s=statistics.median(each.optimizer_s for each in parts),
        wall_s=wall,
        cpu_s=cpu,
        waited_s=waited,
        busy=now.share_since(busy),
        stolen=now.stolen_since(busy),
        sent_bytes=None if sent is None or after is None else (after - sent) / num_steps,
        counted_bytes=(ours_after - mine) / num_steps if ours else None,
        extra={"notices": list(bagua.stats(model).notices)} if ours else {},
    )


def _counted(model: EmulatedModel) -> int:
    return bagua.stats(model).total.bytes_sent


def _profile(training: Training, trace: str) -> None:
    """Two more steps on all ranks; where `trace` names a file, with a timeline of all threads."""
    from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

    if not trace:
        for _ in range(_PROFILED):
            training.step()
        return
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as timeline:
        for _ in range(_PROFILED):
            training.step()
    timeline.export_chrome_trace(trace)

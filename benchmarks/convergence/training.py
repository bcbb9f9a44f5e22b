"""One run: a configuration, a task and a seed, in the simulator; and what simulated and real runs share."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import bagua
from benchmarks.convergence.configurations import Configuration
from benchmarks.convergence.tasks import RANKS, Task

__all__ = ["CURVE_POINTS", "Job", "Outcome", "Recorder", "Schedule", "flat", "simulate"]

CURVE_POINTS = 16


class Job(NamedTuple):
    """One run to be made: the task's name, the configuration, the seed, and what makes the task."""

    task: str
    configuration: Configuration
    seed: int
    make_task: Callable[[], Task]


@dataclass(frozen=True)
class Outcome:
    """Of one run.

    Attributes:
        task, configuration, seed: which.
        accuracy, loss: of the mean of all ranks' weights, on the data held out.
        accuracy_rank0, loss_rank0: of rank 0's weights.
        bytes_per_step: sent per rank, mean over ranks and steps.
        consensus: distance of the weights from their mean at the end, as in `bagua.Simulation`.
        seconds: on the clock.
        curve_steps, curve_loss, curve_mb: steps done, loss of the mean weights on a part of the data held out, and
            megabytes sent per rank until then.
        error: what stopped the run, or "".
        accuracy_own, loss_own: means over the ranks of what each rank's own weights reach.
    """

    task: str
    configuration: str
    seed: int
    accuracy: float
    loss: float
    accuracy_rank0: float
    loss_rank0: float
    bytes_per_step: float
    consensus: float
    seconds: float
    curve_steps: tuple[int, ...]
    curve_loss: tuple[float, ...]
    curve_mb: tuple[float, ...]
    error: str = ""
    accuracy_own: float = math.nan
    loss_own: float = math.nan


def flat(module: nn.Module) -> Tensor:
    """Return a copy of all weights: [N], fp32."""
    return torch.cat([param.detach().reshape(-1) for param in module.parameters()])


class Schedule:
    """Linear growth of the learning rates with which optimizers were made, then half a cosine down to 0.

    Args:
        optimizers: of one rank.
        steps: of the run.
        warm: part of them in which the rates grow.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], steps: int, warm: float) -> None:
        self._rates = [(group, float(group["lr"])) for each in optimizers for group in each.param_groups]
        self._steps, self._warm = steps, warm

    def set(self, step: int) -> None:
        """Call before each step, counted from 0."""
        grown = min(1.0, (step + 1) / (self._warm * self._steps))
        for group, rate in self._rates:
            group["lr"] = rate * grown * 0.5 * (1 + math.cos(math.pi * step / self._steps))


class Recorder:
    """Keeps the weights and bytes of one rank at some steps; evaluates the means of all ranks afterwards."""

    def __init__(self, task: Task) -> None:
        self.task = task
        count = min(CURVE_POINTS, task.steps)
        self.at = tuple(sorted({round(index * task.steps / count) for index in range(count)}))
        self.weights: list[Tensor] = []
        self.mb: list[float] = []

    def look(self, step: int, module: nn.Module, bytes_sent: float) -> None:
        """Call before every step."""
        if step in self.at:
            self.keep(module, bytes_sent)

    def keep(self, module: nn.Module, bytes_sent: float) -> None:
        """Keep what is now; call at the end too."""
        self.weights.append(flat(module))
        self.mb.append(bytes_sent / 1e6)

    def outcome(
        self, module: nn.Module, weights: Sequence[Tensor], mb: Sequence[float], name: str, seed: int, seconds: float
    ) -> Outcome:
        """Evaluate.

        Args:
            module: any of the models; its weights are not used and not changed.
            weights: [R, N] at each step of `at`, and at the end.
            mb: megabytes sent until then.
            name: of the configuration.
            seed: of the run.
            seconds: that it took.
        """
        probe, task = copy.deepcopy(module), self.task
        means = [each.double().mean(0) for each in weights]
        curve = [task.evaluate(_load(probe, mean), curve=True).loss for mean in means]
        last, mean = weights[-1], means[-1]
        final = task.evaluate(_load(probe, mean))
        equal = all(torch.equal(each, last[0]) for each in last)
        own = [task.evaluate(_load(probe, each)) for each in (last[:1] if equal else last)]
        return Outcome(
            task=task.name,
            configuration=name,
            seed=seed,
            accuracy=final.accuracy,
            loss=final.loss,
            accuracy_rank0=own[0].accuracy,
            loss_rank0=own[0].loss,
            bytes_per_step=1e6 * mb[-1] / task.steps,
            consensus=(last.double() - mean).square().sum(1).mean().sqrt().item(),
            seconds=seconds,
            curve_steps=(*self.at, task.steps),
            curve_loss=tuple(curve),
            curve_mb=tuple(mb),
            accuracy_own=sum(each.accuracy for each in own) / len(own),
            loss_own=sum(each.loss for each in own) / len(own),
        )


def _load(module: nn.Module, weights: Tensor) -> nn.Module:
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(weights.float(), module.parameters())
    return module


def simulate(configuration: Configuration, task: Task, seed: int) -> Outcome:
    """Train 4 ranks in this process, deterministically."""
    started = time.perf_counter()
    recorders = [Recorder(task) for _ in range(RANKS)]
    schedules: dict[int, Schedule] = {}  # by the identity of the first parameter

    def optimizer(params: Any) -> list[torch.optim.Optimizer]:
        made = task.optimizers(configuration, params)
        schedules[id(params[0])] = Schedule(made, task.steps, task.warm)
        return made

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        schedules[id(next(module.parameters()))].set(step)
        recorders[rank].look(step, module, bagua.stats(module).total.bytes_sent)
        return task.loss(module, rank, step)

    result = bagua.simulate(
        configuration.make(task.steps),
        ranks=RANKS,
        model=task.model,
        loss=loss,
        steps=task.steps,
        optimizer=optimizer,
        seed=seed,
        bucket_bytes=task.bucket_bytes,
    )
    for recorder, model, stats in zip(recorders, result.models, result.stats, strict=True):
        recorder.keep(model, stats.total.bytes_sent)
    weights = [torch.stack(each) for each in zip(*(recorder.weights for recorder in recorders), strict=True)]
    mb = [sum(each) / RANKS for each in zip(*(recorder.mb for recorder in recorders), strict=True)]
    seconds = time.perf_counter() - started
    return recorders[0].outcome(result.models[0], weights, mb, configuration.name, seed, seconds)

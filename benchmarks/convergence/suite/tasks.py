"""The four tasks: a convolutional net and a regression with SGD, a GPT and a vision transformer with AdamW.

Data are drawn from the seed, the functions and classes to be learned too. Seeds below 100 are for choosing defaults,
learning rates and sizes; seeds from 100 on are for judging, and nothing is chosen on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bagua
from benchmarks.char_lm import draw_windows, even_windows
from benchmarks.convergence.byte_gpt import MATRIX_OPTIMIZERS, MUON_RATE, OWN_OPTIMIZERS
from benchmarks.convergence.configurations import Configuration
from benchmarks.convergence.suite import models
from benchmarks.convergence.suite.data import Images, Noisy, load_text
from benchmarks.convergence.tasks import RANKS, Batch, Evaluation, Task

__all__ = ["JUDGING", "STEPS", "SUITE", "SuiteTask", "families", "make_suite_task", "model_spec"]

JUDGING = 100  # the first seed that is for judging
STEPS = 512
_HELD_OUT = 1 << 20  # added to a seed, for the generator of held-out samples
_ORDER = 1 << 24  # likewise, for the training samples of another order
_DECAY = 0.01  # of weights, decoupled
_ADAMS = ("adamw", "lamb", "muon")


@dataclass(frozen=True)
class SuiteTask(Task):
    """A task whose optimizers are those of its families, at the defaults of their own policies."""

    @cached_property
    def _matrices(self) -> list[bool]:
        """For each parameter: whether Muon or `dion` trains it. They take the matrices of the blocks."""
        named = self.model().named_parameters()
        return [name.startswith("blocks.") and param.dim() == 2 for name, param in named]

    def optimizers(self, configuration: Configuration, params: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
        """Return the optimizers of `params`, all that the model has, in its order."""
        kind, rates = configuration.optimizer or configuration.family, self.rates
        if kind == "sgd":
            return [torch.optim.SGD(params, lr=rates["sgd"], momentum=0.9)]
        if kind == "adamw":
            return [torch.optim.AdamW(params, lr=rates["adamw"], weight_decay=_DECAY)]
        if kind == "lamb":  # the first stage, which is LAMB, for ever
            return [bagua.optim.OneBitLamb(params, rates["lamb"], self.steps + 1, weight_decay=_DECAY)]
        if kind == "one_bit_lamb":
            return [bagua.optim.OneBitLamb(params, rates["lamb"], weight_decay=_DECAY)]
        if kind in MATRIX_OPTIMIZERS:
            matrices = [param for param, chosen in zip(params, self._matrices, strict=True) if chosen]
            rest = [param for param, chosen in zip(params, self._matrices, strict=True) if not chosen]
            first = MATRIX_OPTIMIZERS[kind](matrices, lr=rates["muon"], weight_decay=_DECAY)
            return [first, torch.optim.AdamW(rest, lr=rates["adamw"], weight_decay=_DECAY)]
        return [OWN_OPTIMIZERS[kind](params, lr=rates["adamw"], weight_decay=_DECAY)]


@dataclass(frozen=True)
class Regression(SuiteTask):
    """Huber loss on noisy targets; a prediction is right if it is within `close` of the function without noise."""

    close: float = 0.25

    def loss(self, module: nn.Module, rank: int, step: int) -> Tensor:
        """Mean Huber loss of a rank's batch."""
        inputs, targets = self.batches[step][rank]
        return F.huber_loss(module(inputs)[:, 0], targets[:, 0])

    @torch.no_grad()
    def evaluate(self, module: nn.Module, *, curve: bool = False) -> Evaluation:
        """Mean Huber loss, and fraction of right predictions."""
        inputs, targets = self.curve_test if curve else self.test
        found = module(inputs)[:, 0]
        near = ((found - targets[:, 1]).abs() <= self.close).float().mean().item()
        return Evaluation(F.huber_loss(found, targets[:, 0]).item(), near)


Sampler = Callable[[int, torch.Generator], Batch]


def _batches(draw: Sampler, steps: int, batch: int, seed: int, order: int) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(seed + order * _ORDER)
    return [[draw(batch, generator) for _ in range(RANKS)] for _ in range(steps)]


def _drawn(draw: Sampler, count: int, seed: int) -> tuple[Batch, Batch]:
    """Held-out samples, and the part of them for the curves."""
    inputs, targets = draw(count, torch.Generator().manual_seed(_HELD_OUT + seed))
    return (inputs, targets), (inputs[: count // 4], targets[: count // 4])


def _images(
    name: str, model: Callable[[], nn.Module], rates: Mapping[str, float], seed: int, steps: int, order: int
) -> SuiteTask:
    images, batch, held_out = Images(seed), 16, 1024
    test, part = _drawn(images.draw, held_out, seed)
    about = {"data": "deformed, covered and noisy templates", "batch_per_rank": batch, "test": held_out}
    batches = _batches(images.draw, steps, batch, seed, order)
    return SuiteTask(name, "loss", model, batches, test, part, rates, about, bucket_bytes=None)


def _gpt(seed: int, steps: int, order: int) -> SuiteTask:
    text, batch, context = load_text(seed), 4, 32
    batches = _batches(lambda count, g: draw_windows(text.train, count, context, g), steps, batch, seed, order)
    test, part = even_windows(text.test, 256, context), even_windows(text.test, 64, context)
    about = {"data": f"{text.files} files of the standard library", "digest": text.digest, "window": context}
    about |= {"batch_per_rank": batch, "train": len(text.train), "test": len(text.test)}
    rates = {"adamw": 4e-3, "lamb": 0.02, "muon": MUON_RATE}
    return SuiteTask("gpt", "loss", models.gpt, batches, test, part, rates, about, warm=0.1, bucket_bytes=None)


def _regression(seed: int, steps: int, order: int) -> SuiteTask:
    noisy, batch, held_out = Noisy(seed), 16, 4096
    test, part = _drawn(noisy.draw, held_out, seed)
    about = {"data": "a random function; inputs and noise of Student's t", "batch_per_rank": batch, "test": held_out}
    batches, rates = _batches(noisy.draw, steps, batch, seed, order), {"sgd": 0.06}
    return Regression("regression", "loss", models.perceptron, batches, test, part, rates, about, bucket_bytes=None)


class _Entry(NamedTuple):
    """What makes a task from seed, steps and order, what makes its model, and the optimizers' families on it."""

    make: Callable[[int, int, int], SuiteTask]
    model: Callable[[], nn.Module]
    families: tuple[str, ...]


SUITE: Mapping[str, _Entry] = {
    "conv": _Entry(partial(_images, "conv", models.convolutional, {"sgd": 0.05}), models.convolutional, ("sgd",)),
    "gpt": _Entry(_gpt, models.gpt, _ADAMS),
    "vit": _Entry(
        partial(_images, "vit", models.vision_transformer, {"adamw": 6e-3, "lamb": 0.02, "muon": MUON_RATE}),
        models.vision_transformer,
        _ADAMS,
    ),
    "regression": _Entry(_regression, models.perceptron, ("sgd",)),
}


def families(task: str) -> tuple[str, ...]:
    """Return the families of optimizers that run on a task; the first has the baseline of most rows."""
    return SUITE[task].families


def model_spec(task: str) -> str:
    """Return the task's model as `bagua.plan.load_model` takes it."""
    return f"{Path(models.__file__)}:{SUITE[task].model.__name__}"


def make_suite_task(name: str, seed: int, steps: int, rate: float = 1.0, order: int = 0) -> SuiteTask:
    """Return the task of that name, with data of that seed, for a run of so many steps.

    Args:
        name: of `SUITE`.
        seed: draws what is learned, samples and initial weights.
        steps: of the run.
        rate: factor of the learning rates.
        order: other than 0: the same task and initial weights, and other training samples.

    Raises:
        ValueError: no such task.
    """
    if name not in SUITE:
        raise ValueError(f"task {name!r} is unknown; available: {', '.join(SUITE)}")
    task = SUITE[name].make(seed, steps, order)
    return replace(task, rates={family: rate * each for family, each in task.rates.items()})

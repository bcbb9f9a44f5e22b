"""What is learned: handwritten digits, and characters of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.char_lm import CharLM, draw_windows, even_windows, load_text
from benchmarks.convergence.configurations import Configuration, make_optimizer

__all__ = ["BUCKET_BYTES", "RANKS", "TASKS", "Batch", "Evaluation", "Task", "make_task"]

RANKS = 4
BUCKET_BYTES = 96 * 1024  # several buckets, small as the models are
Batch = tuple[Tensor, Tensor]


class Evaluation(NamedTuple):
    """Of one model on the data that was held out."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Task:
    """A model, each rank's data and what to measure.

    Attributes:
        name: on the command line.
        metric: what the target is about, "accuracy" or "loss".
        model: makes the module.
        batches: [steps][ranks], inputs and classes.
        test: inputs and classes held out.
        curve_test: a part of it, for the curves.
        rates: learning rate by family of optimizers.
        about: for the report.
        warm: part of the steps in which the learning rate grows.
        bucket_bytes: as in `bagua.distribute`; None for its default.
    """

    name: str
    metric: str
    model: Callable[[], nn.Module]
    batches: list[list[Batch]]
    test: Batch
    curve_test: Batch
    rates: Mapping[str, float]
    about: Mapping[str, str | int]
    warm: float = 0.05
    bucket_bytes: int | None = BUCKET_BYTES

    @property
    def steps(self) -> int:
        """Training steps."""
        return len(self.batches)

    def optimizers(self, configuration: Configuration, params: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
        """Return the optimizers of `params`, with the learning rates that the schedule begins from."""
        kind, rate = configuration.optimizer or configuration.family, self.rates[configuration.family]
        return [make_optimizer(kind, params, rate, self.steps)]

    def loss(self, module: nn.Module, rank: int, step: int) -> Tensor:
        """Mean cross entropy of a rank's batch."""
        inputs, classes = self.batches[step][rank]
        return F.cross_entropy(module(inputs).flatten(0, -2), classes.flatten())

    @torch.no_grad()
    def evaluate(self, module: nn.Module, *, curve: bool = False) -> Evaluation:
        """Mean cross entropy, and fraction of right answers."""
        inputs, classes = self.curve_test if curve else self.test
        logits, right = module(inputs).flatten(0, -2), classes.flatten()
        accuracy = (logits.argmax(1) == right).float().mean().item()
        return Evaluation(F.cross_entropy(logits, right).item(), accuracy)


class DigitsNet(nn.Module):
    """The net of examples/digits.py, narrower and without dropout; 39,328 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * 4 * 4, 66)
        self.out = nn.Linear(66, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, 10] of images [B, 1, 8, 8]."""
        x = F.relu(self.conv1(images))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.out(F.relu(self.hidden(x.flatten(1))))


def digits(seed: int, quick: bool) -> Task:
    """A third of the images is held out, another third for each seed."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    epochs, batch = (1, 32) if quick else (8, 16)
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=1 / 3, stratify=labels, random_state=seed)
    x_train, x_test, y_train, y_test = (torch.from_numpy(part) for part in parts)
    x_train, x_test = ((x.float() / 16).view(-1, 1, 8, 8) for x in (x_train, x_test))
    generator = torch.Generator().manual_seed(seed)
    batches: list[list[Batch]] = []
    for _ in range(epochs):
        order = torch.randperm(len(y_train), generator=generator)
        whole = order[: len(order) // (RANKS * batch) * (RANKS * batch)].view(-1, RANKS, batch)
        batches += [[(x_train[rows], y_train[rows]) for rows in step] for step in whole]
    test = (x_test, y_test)
    about = {"data": "scikit-learn digits", "train": len(y_train), "test": len(y_test), "epochs": epochs}
    rates = {"sgd": 0.05, "adam": 0.003, "lamb": 0.02}
    return Task("digits", "accuracy", DigitsNet, batches, test, test, rates, {**about, "batch_per_rank": batch})


def char_lm(seed: int, quick: bool) -> Task:
    """Every tenth stretch of the text is held out."""
    text, length = load_text(), 16
    steps, batch = (4, 4) if quick else (160, 16)
    generator = torch.Generator().manual_seed(seed)
    batches = [[draw_windows(text.train, batch, length, generator) for _ in range(RANKS)] for _ in range(steps)]
    about = {"data": "Python's language reference", "digest": text.digest, "train": len(text.train)}
    about |= {"test": len(text.test), "window": length, "batch_per_rank": batch}
    test, part = (even_windows(text.test, count, length) for count in ((16, 8) if quick else (512, 128)))
    rates = {"sgd": 0.4, "adam": 0.01, "lamb": 0.03}
    return Task("char_lm", "loss", CharLM, batches, test, part, rates, about)


TASKS: Mapping[str, Callable[[int, bool], Task]] = {"digits": digits, "char_lm": char_lm}


def make_task(name: str, seed: int = 0, quick: bool = False) -> Task:
    """Return the task of that name; data and their order depend on the seed.

    Raises:
        ValueError: no such task.
    """
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown; available: {', '.join(TASKS)}")
    return TASKS[name](seed, quick)

"""Samples of 602,112 bytes that take some 10 ms of a core to compute."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["SAMPLE_BYTES", "Samples", "calibrate"]

_SHAPE = (3, 224, 224)
SAMPLE_BYTES = 3 * 224 * 224 * 4


def compute(index: int, rounds: int) -> Tensor:
    """Return an image; the work is the same every time, whatever the machine is doing beside."""
    x = torch.full(_SHAPE, float(index))
    y = torch.linspace(0, 1, 50_000)
    for _ in range(rounds):
        y = torch.sin(y * 1.01 + 0.1)
    return x + y[0] * 0


def calibrate(target_ms: float) -> int:
    """Return how many rounds take `target_ms`, on a quiet core."""
    best = min(_timed(200) for _ in range(7))
    return max(1, round(200 * target_ms / best))


def _timed(rounds: int) -> float:
    begin = time.perf_counter()
    compute(0, rounds)
    return 1000 * (time.perf_counter() - begin)


class Samples(Dataset[Any]):
    """`size` samples from number `begin` on, each with its number."""

    def __init__(self, begin: int, size: int, rounds: int) -> None:
        self.begin, self.size, self.rounds = begin, size, rounds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self.begin + index
        return {"image": compute(number, self.rounds), "label": number}

"""Gates and layers as loops over tokens in numpy and plain torch, with nothing sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn


@dataclass
class Expected:
    """rows[e]: (token, weight, choice) that expert e gets, in the order of choice and token."""

    rows: list[list[tuple[int, float, int]]]
    counts: list[int]
    l_aux: float
    dropped: int


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def route(
    logits: np.ndarray,
    k: int,
    capacity: float = math.inf,
    used: Sequence[bool] | None = None,
    noise: np.ndarray | None = None,
    priority: Sequence[float] | None = None,
) -> Expected:
    """One token after the other, as the papers have it."""
    tokens, experts = logits.shape
    gates, noisy = softmax(logits), logits if noise is None else logits + noise
    live = [s for s in range(tokens) if used is None or used[s]]
    first = [int(np.argmax(noisy[s] if k == 1 else logits[s])) for s in range(tokens)]
    second = [-1] * tokens
    if k == 2 and experts > 1:
        for s in range(tokens):
            others = [(noisy[s, e], -e) for e in range(experts) if e != first[s]]
            second[s] = -max(others)[1]
    wanted = [(s, 0, first[s]) for s in live] + [(s, 1, second[s]) for s in live if second[s] >= 0]
    if priority is not None:
        wanted.sort(key=lambda each: -priority[each[0]])
    taken, kept = [0] * experts, set()
    for s, choice, e in wanted:
        if taken[e] < capacity:
            taken[e] += 1
            kept.add((s, choice, e))
    rows: list[list[tuple[int, float, int]]] = [[] for _ in range(experts)]
    for s, choice, e in sorted(kept, key=lambda each: (each[1], each[0])):
        weight = gates[s, e]
        if k == 2:
            weight /= sum(gates[s, other] for token, _, other in kept if token == s)
        rows[e].append((s, float(weight), choice))
    counts = [sum(first[s] == e for s in live) for e in range(experts)]
    l_aux = experts * sum(gates[:, e].mean() * counts[e] / tokens for e in range(experts))
    return Expected(rows, counts, float(l_aux), len(wanted) - len(kept))


def answer(
    x: Tensor, expected: Expected, gates: Tensor, experts: Sequence[Callable[[Tensor], Tensor]], k: int
) -> Tensor:
    """What a layer returns for one rank's tokens `x` when all experts are here; differentiable."""
    out = []
    for s in range(len(x)):
        mine = [(e, choice) for e, rows in enumerate(expected.rows) for t, _, choice in rows if t == s]
        total = torch.zeros_like(x[s])
        norm = sum(gates[s, e] for e, _ in mine) if k == 2 else 1.0
        for e, _ in mine:
            total = total + gates[s, e] / norm * experts[e](x[s : s + 1])[0]
        out.append(total)
    return torch.stack(out)


def expert(width: int = 6, hidden: int = 9) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))

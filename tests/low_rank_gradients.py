"""Gradients for the tests of low-rank exchanges: any, none at all, and such as have a lower rank than the factors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["degenerate", "normal"]


def normal(rank: int, step: int, numel: int) -> np.ndarray:
    """[numel], another one for each rank and step."""
    return np.random.default_rng([7, rank, step]).normal(size=numel)


def degenerate(shapes: Sequence[tuple[int, int]], step: int) -> np.ndarray | None:
    """Of all matrices [n, m], one after the other: zero in steps 0 and 1, of rank one in 2 and 3; None after that."""
    if step < 2:
        return np.zeros(sum(n * m for n, m in shapes))
    if step < 4:
        return np.concatenate([np.outer(np.ones(n), normal(0, n, m)).reshape(-1) for n, m in shapes])
    return None

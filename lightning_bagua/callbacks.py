"""Which callbacks of Lightning an algorithm works with."""

from __future__ import annotations

from collections.abc import Iterable

from bagua.algorithms import Algorithm
from bagua.algorithms.base import Payload

__all__ = ["check_callbacks"]


def check_callbacks(callbacks: Iterable[object], algorithm: Algorithm) -> None:
    """Refuse callbacks that do not work with algorithms that exchange weights.

    `ModelPruning` would prune each rank by weights of its own, and it gives parameters other storage than that which is
    exchanged.

    Raises:
        ValueError: names the callback and the algorithm.
    """
    if algorithm.payload is not Payload.PARAM:
        return
    for callback in callbacks:
        if any(base.__name__ == "ModelPruning" for base in type(callback).__mro__):
            raise ValueError(
                f"callbacks: {type(callback).__name__} does not work with {algorithm.name!r}, which exchanges weights: "
                "ranks would be pruned alike only by equal weights; use an algorithm that exchanges gradients, such as "
                "'gradient_allreduce' or 'bytegrad'"
            )

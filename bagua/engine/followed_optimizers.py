"""The optimizers whose steps end a module's training steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

__all__ = ["FollowedOptimizers"]


class FollowedOptimizers:
    """Weak references to the tracked optimizers, by number; a number is never reused.

    Attributes:
        refs: return None once the optimizer is gone or another took its place.
        expects_more: others are expected, for parameters that those which still exist do not hold.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.refs: list[Callable[[], torch.optim.Optimizer | None]] = list(map(weakref.ref, optimizers))
        self.expects_more = False

    @property
    def alive(self) -> list[torch.optim.Optimizer]:
        """Those that still exist."""
        return [optimizer for ref in self.refs if (optimizer := ref()) is not None]

    def take_over(self, others: FollowedOptimizers) -> None:
        """Follow what `others` follow, under the same numbers."""
        self.refs[:] = others.refs
        self.expects_more = others.expects_more

    def uncount(self, stepped: Iterable[int]) -> None:
        """Those with these numbers have stepped without gradients, and the step does not count.

        Most count steps by parameter, and so none. One that counts them all the same has a method `uncount_step`.
        """
        for number in stepped:
            if (take_back := getattr(self.refs[number](), "uncount_step", None)) is not None:
                take_back()

    def adopt(self, optimizer: torch.optim.Optimizer, instead_of: Sequence[int]) -> int:
        """Follow `optimizer` instead of those with these numbers; return its own."""
        for number in instead_of:
            self.refs[number] = _nothing
        number = next((each for each in instead_of), len(self.refs))
        self.refs[number : number + 1] = [weakref.ref(optimizer)]
        return number


def _nothing() -> None:
    return None

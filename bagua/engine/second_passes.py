"""Several synchronised backward passes before a step, where a pass leaves no gradient behind but a step."""

from __future__ import annotations

from bagua.algorithms.base import Algorithm

__all__ = ["refuse_second_pass"]


def refuse_second_pass(algorithm: Algorithm) -> None:
    """At the beginning of a synchronised pass that adds to the gradients of another one since the last step.

    Raises:
        RuntimeError: they are steps of a size of their own.
    """
    if not algorithm.scales_with_loss:
        raise RuntimeError(
            f"{algorithm.name!r} has made a step of the gradients of a backward pass, and another pass would add its "
            "gradients to that step; run all backward passes before an optimizer's step but the last within "
            "bagua.no_sync(module), or zero the gradients in between"
        )

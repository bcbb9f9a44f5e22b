"""The promise `static_graph=True`: every pass uses the same parameters, each as often as in the first pass."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StaticGraph"]


class StaticGraph:
    """What the first pass of a static graph has shown; parameters are indices, sets of them bitmaps.

    Attributes:
        repeats: by parameter, how many gradients come in a pass after its first one.
        repeats_left: of them, in this pass, those still to come.
        union: parameters that any rank uses; None until it was asked for.
    """

    def __init__(self) -> None:
        self.repeats: dict[int, int] = {}
        self.repeats_left = 0
        self.union: int | None = None
        self._used: int | None = None  # on this rank

    def begin_pass(self) -> None:
        """All repeats are to come."""
        self.repeats_left = sum(self.repeats.values())

    def note_repeat(self, index: int) -> None:
        """In the first pass: another gradient of parameter `index` has come."""
        self.repeats[index] = self.repeats.get(index, 0) + 1

    def check(self, used: int, names: Sequence[str]) -> None:
        """Compare the parameters that a pass has used with those of the first one.

        Raises:
            RuntimeError: they differ; names some of them.
        """
        if self._used is None:
            self._used = used
        elif used != self._used:
            changed = [name for i, name in enumerate(names) if (used ^ self._used) >> i & 1]
            raise RuntimeError(
                f"static_graph=True, but this step used other parameters than the first one: {', '.join(changed[:5])}"
            )

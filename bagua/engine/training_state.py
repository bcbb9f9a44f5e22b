"""The mutable training state, shared by the parts of an engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bagua.algorithms.base import Algorithm, LostStep
from bagua.engine.reducer.bucket import Bucket

__all__ = ["TrainingState"]

_log = logging.getLogger("bagua")


@dataclass
class TrainingState:
    """Plain values; each has one writer.

    Attributes:
        root: the algorithm given to `distribute`.
        algorithm: the algorithm in force; another one once `root` has handed over.
        bucket_bytes: payload of a bucket.
        order: parameter names in the order in which gradients become ready, None until that is known.
        rank: of this process, for the log.
        buckets: in the order of exchange; none before there is a plan.
        step: training steps completed.
        exchanged: something was launched on the shared lanes since the backward pass of this step began.
        paused: nothing may begin in the background.
        before_load: sums of the weights before `load_state_dict` replaced some since the last backward pass, else None.
        schedule: algorithms that take over, by the step after which they do.
        loss_scale: of the gradient scaler that made the last step, which keeps it up to date; None: there is none.
        notices: remarks for the user.
    """

    root: Algorithm
    algorithm: Algorithm
    bucket_bytes: int
    order: list[str] | None
    rank: int
    buckets: list[Bucket] = field(default_factory=list)
    step: int = 0
    exchanged: bool = False
    paused: bool = False
    before_load: list[int] | None = None
    schedule: dict[int, Algorithm] = field(default_factory=dict)
    loss_scale: Tensor | None = None
    notices: tuple[str, ...] = ()

    @property
    def lost_step(self) -> LostStep | None:
        """The rule of the algorithm of the next step. Before the first buckets `root` has not handed over to it yet."""
        return (self.root.at_step(self.step) if self.algorithm is self.root else self.algorithm).lost_step

    def notice(self, text: str, urgent: bool = False) -> None:
        """Log `text`, as a warning or as information, and keep it; a text is logged once."""
        if text not in self.notices:
            self.notices += (text,)
            _log.log(logging.WARNING if urgent else logging.INFO, "rank %d: %s", self.rank, text)

    def keep_notices(self, texts: Sequence[str]) -> None:
        """Keep texts that were logged already."""
        self.notices += tuple(texts)

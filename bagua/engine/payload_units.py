"""What exchanges keep is in units of gradients, which a gradient scaler multiplies with its loss scale."""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.algorithms.base import Payload
from bagua.engine.parts import ExchangeParts, TrainingParts

__all__ = ["PayloadUnits"]


class PayloadUnits:
    """Multiplies what exchanges keep of earlier gradients by the change of the loss scale, before the next pass.

    Otherwise an error that was made at 65536 times the gradients counts 256 times too much at 256 times the gradients.
    All ranks have the same scale, as their gradients are averaged. The scaler is known from the first step on that it
    makes; one of Bagua's from the first one that it is asked for. What passes before that leave behind is undone by
    `DiscardedPasses`, or is in the units of that step.
    """

    def __init__(self, training: TrainingParts, exchanges: ExchangeParts) -> None:
        self._state, self._memory = training.state, exchanges.memory
        self._kept_at: Tensor | None = None  # the loss scale of what is kept; None: not known, or there is no scaler

    def pass_begins(self) -> None:
        """Bring what is kept to the loss scale of now. Nothing may be in flight."""
        scale = self._state.loss_scale
        if scale is None or self._state.algorithm.payload is not Payload.GRAD:
            return
        now, before = scale.detach().clone(), self._kept_at
        self._kept_at = now
        if before is None:
            return
        # On a GPU the two are not compared: the host would wait for the forward pass.
        if now.device.type != "cpu" or float(now) != float(before):
            ratio = now / before.to(now.device)
            self._multiply(torch.where(ratio.isfinite(), ratio, 1.0))

    def follow(self, scale: Tensor | None) -> None:
        """A scaler makes or skips a step, or none makes it.

        Args:
            scale: of the gradients that were exchanged last; the scaler changes it in place afterwards.
        """
        if scale is not self._state.loss_scale:
            self._state.loss_scale = scale
            self._kept_at = None if scale is None else scale.detach().clone()

    def save(self) -> float | None:
        """The loss scale of what is kept, after it was brought to that of the next pass; None: there is no scaler."""
        self.pass_begins()
        return None if self._state.loss_scale is None or self._kept_at is None else float(self._kept_at)

    def load(self, scale: float | None) -> None:
        """What `save` returned when the state was saved that is kept now.

        Until a scaler is known, its scale is taken to be this one.
        """
        if scale is None:
            known = self._state.loss_scale is not None and self._kept_at is not None
            self._kept_at = torch.ones((), dtype=torch.float32, device="cpu") if known else None
            return
        self._kept_at = torch.tensor(scale, dtype=torch.float32, device="cpu")
        if self._state.loss_scale is None:
            self._state.loss_scale = self._kept_at.clone()

    def take_over(self, old: PayloadUnits) -> None:
        """What is kept comes from there."""
        self._state.loss_scale, self._kept_at = old._state.loss_scale, old._kept_at

    @torch.no_grad()
    def _multiply(self, ratio: Tensor) -> None:
        for (exchange, _, _), state in self._memory.states.items():
            for name in exchange.scales_with_payload:
                if name in state:
                    state[name].mul_(ratio.to(state[name].device))

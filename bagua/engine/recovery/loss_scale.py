"""The loss scale of a loop in mixed precision, which ranks that average gradients must have in common."""

from __future__ import annotations

import weakref
from typing import Any

import torch

__all__ = ["LossScale"]


class LossScale:
    """The state of the scaler that multiplies the losses of the fault-tolerant module.

    Gradients are averaged as they are, multiplied by the scale. So a rank that joins needs the scale of the others, and
    a loss after which ranks may have updated theirs differently must leave one.
    """

    def __init__(self) -> None:
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None
        self._sure = False  # that it scales the losses of this module
        self._received: dict[str, Any] | None = None

    def follow(self, scaler: torch.amp.GradScaler, sure: bool = False) -> None:
        """`scaler` is used. Before its first loss it takes over what other ranks have told.

        Args:
            sure: it has unscaled gradients of the module. Else it may scale losses of another one.

        Raises:
            RuntimeError: another one is used for the module already.
        """
        known = self._known
        if known is not scaler:
            if known is not None and not sure:
                return
            if known is not None and self._sure:
                raise RuntimeError(
                    "fault_tolerant: two GradScalers scale losses of the module; use one, so that a rank that joins "
                    "gets its scale"
                )
            self._scaler, self._sure = weakref.ref(scaler), False
            if self._received is not None:
                scaler.load_state_dict(self._received)
                self._received = None
        self._sure |= sure

    def report(self) -> dict[str, Any] | None:
        """For other ranks: plain data; None without a scaler."""
        known = self._known
        return self._received if known is None else known.state_dict()

    def receive(self, state: dict[str, Any] | None) -> None:
        """Take over what another rank has reported."""
        known = self._known
        if state is None:
            return
        if known is None:
            self._received = state
        else:
            known.load_state_dict(state)

    @property
    def _known(self) -> torch.amp.GradScaler | None:
        return None if self._scaler is None else self._scaler()

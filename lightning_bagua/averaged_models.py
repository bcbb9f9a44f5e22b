"""Models that callbacks form of this rank's weights: moving averages, averages over epochs."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import bagua
from bagua.engine.hooks import attachments

__all__ = ["average_models", "pause_with_weights"]


def average_models(callbacks: Iterable[object], module: nn.Module) -> None:
    """Average the models of `callbacks` over all ranks, if those of the ranks differ. Collective.

    Moving averages are linear: the mean over the ranks is the moving average of the mean weights. Buffers stay this
    rank's own, as the module's do.

    Raises:
        CommunicationError: a rank did not come.
    """
    params: list[Tensor] = [param for model in _models(callbacks) for param in model.parameters()]
    if params:
        attachments[module].engine.replicas.average_copies(params)


def pause_with_weights(callbacks: Iterable[object], module: nn.Module) -> None:
    """Stop what runs in the background, and leave the weights as the callbacks have set them. Collective.

    At the end of training they copy their models into the module. An average that was in progress then has begun with
    other weights, so the difference that it would add is of no use.
    """
    if not _models(callbacks):
        return
    params = [param.detach() for param in module.parameters()]
    kept = [param.clone() for param in params]
    bagua.pause(module)
    for param, value in zip(params, kept, strict=True):
        param.copy_(value)


def _models(callbacks: Iterable[object]) -> list[nn.Module]:
    """Lightning keeps them as `_average_model`; that of `StochasticWeightAveraging` is no `AveragedModel`."""
    return [
        value
        for callback in callbacks
        for name, value in getattr(callback, "__dict__", {}).items()
        if isinstance(value, AveragedModel) or (name == "_average_model" and isinstance(value, nn.Module))
    ]
